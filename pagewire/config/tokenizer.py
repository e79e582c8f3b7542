"""Flags of the tokenizer service."""

from dataclasses import dataclass

from pagewire.config.fields import POSITIVE, POSITIVE_SECONDS, PROCESSES, flag
from pagewire.config.shared import ModelConfigFlags, PublicListenConfig, RecoveryConfig, SeedConfig


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(ModelConfigFlags, RecoveryConfig, SeedConfig, PublicListenConfig):
    """Converts text to tokens and back."""

    listen: str = flag(
        "0.0.0.0:50051",
        "addresses to serve gRPC on, separated by commas: unix:/path or host:port",
        group="network",
    )
    public_admin: bool = flag(
        True,
        "serve metrics and status on --public-listen, too; `pagewire serve` turns it off with --admin-port",
        group="network",
    )
    scheduler_address: str = flag(
        "localhost:50052", "the scheduler services, separated by commas, each with its own executors", group="network"
    )
    scheduler_discovery: str = flag(
        "static",
        "how scheduler services are found from --scheduler-address; static: at these addresses, dns: at all addresses "
        "of these names, resolved every second, kubernetes: in the ready pods of these services, NAME:PORT or "
        "LABEL=VALUE:PORT",
        group="network",
        choices=("static", "dns", "kubernetes"),
    )
    served_model_name: str | None = flag(
        None,
        "names of the model for clients, separated by commas; answers have the first (default: MODEL)",
        group="model",
        takes="words",
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
        "sampling defaults of requests; auto: those in the model's files, else its authors' advice if the model is "
        "well known, vllm: only those of the API, or a file or its directory",
        group="model",
    )
    override_generation_config: str | None = flag(
        None,
        'JSON object of sampling defaults that take precedence, for instance `{"temperature": 0.6}`; max_new_tokens '
        "is also the limit of requests that ask for more",
        group="model",
        kind="json",
    )
    structured_outputs_config: str | None = flag(
        None,
        'JSON object of defaults for the form of outputs; `{"disable_any_whitespace": true}`: no whitespace in JSON',
        group="model",
        kind="json",
    )
    enable_tokenizer_info_endpoint: bool = flag(
        False, "let clients read the chat template and the special tokens (/tokenizer_info)", group="model"
    )
    trust_request_chat_template: bool = flag(
        False, "render chat templates of requests; only for trusted clients", group="model"
    )
    tool_call_parser: str = flag(
        "auto",
        "format of tool calls in the output; auto: by the chat template, none: calls stay text",
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
        False, "no effect, accepted for compatibility with vLLM; tool calls are always allowed", group="model"
    )
    reasoning_parser: str = flag(
        "auto",
        "format of reasoning in the output; auto: by the chat template, none: reasoning stays text",
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
        "image=16", 'maximum number of images in one request, `image=N` or JSON as `{"image": N}`', group="images"
    )
    allowed_media_domains: str | None = flag(
        None,
        "hosts from which images may be fetched by URL, separated by commas; *: all hosts with public addresses "
        "(default: none, only data URIs)",
        group="images",
    )
    allowed_local_media_path: str | None = flag(
        None, "directory from which images may be read by file: URLs (default: none)", group="images"
    )
    media_fetch_timeout: float = flag(
        10.0, "longest time to fetch an image, in seconds", group="images", valid=POSITIVE_SECONDS
    )
    max_image_bytes: int = flag(
        20 * 1024**2, "largest encoded image; suffixes as in 1MiB", group="images", kind="size", valid=POSITIVE
    )
    max_image_pixels: int = flag(
        50_000_000, "largest width times height of an image", group="images", kind="size", valid=POSITIVE
    )
    mm_processor_kwargs: str | None = flag(
        None,
        'settings of the image processor as a JSON object, for instance `{"max_pixels": 1003520}` (default: those of '
        "the "
        "checkpoint)",
        group="images",
        kind="json",
    )
    tokenizer_pool_size: int | None = flag(
        None, "tokenizer workers (default: by the number of cores)", group="tokenizer", valid=PROCESSES
    )
    tokenizer_pool_type: str = flag(
        "thread",
        "whether workers are threads or processes",
        group="tokenizer",
        choices=("thread", "process"),
    )
    max_queued_prompts: int = flag(
        4096,
        "maximum number of prompts that wait for a tokenizer worker; others are refused with RESOURCE_EXHAUSTED / 429",
        group="tokenizer",
        valid=POSITIVE,
    )
    prompt_timeout: float = flag(
        30.0,
        "longest time to render and encode a prompt, in seconds; the worker is replaced then",
        group="tokenizer",
        valid=POSITIVE_SECONDS,
    )

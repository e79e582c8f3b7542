"""Flags of `pagewire batch`."""

from dataclasses import dataclass

from pagewire.config import SET_BY_STACK, WITHOUT_TLS, ServeConfig
from pagewire.config.fields import POSITIVE, flag


@dataclass(frozen=True, kw_only=True)
class BatchCommandConfig(ServeConfig):
    """The command's own flags, and those of the stack that it starts without a URL."""

    input_file: str = flag("", "requests, one a line, as `/v1/batches` takes them", group="batch", short="i")
    output_file: str = flag(
        "", "file to which answers are appended; requests with an answer in it are skipped", group="batch", short="o"
    )
    url: str | None = flag(
        None, "server that answers, for instance http://localhost:8000 (default: starts MODEL itself)", group="batch"
    )
    concurrency: int = flag(64, "requests in flight", group="batch", valid=POSITIVE)
    log_level: str = flag(
        "warning",
        "least severe level to log",
        group="observability",
        choices=("debug", "info", "warning", "error"),
    )


# Of the connection flags, certificates are for --url.
OWN_FLAGS = frozenset({"input_file", "output_file", "url", "concurrency", "log_level", *WITHOUT_TLS})
# A stack for this command alone needs no address, and as it ends with the command, no data directory.
NOT_OFFERED = (
    *SET_BY_STACK,
    "ssl_cert_reqs",
    "host",
    "port",
    "grpc_port",
    "api_server_count",
    "uds_dir",
    "data_dir",
    "batch_concurrency",
    "max_file_bytes",
    "file_store_size",
)

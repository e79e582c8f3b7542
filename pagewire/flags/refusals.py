"""Checks of flags in combination, which commands make before they start anything; `--show-config` and `pagewire doctor`
make the same checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pagewire.config import ExecutorConfig, ServeConfig, ServiceConfig
from pagewire.config.speculation import Speculation
from pagewire.errors import StartupError
from pagewire.process import binding, local_executors
from pagewire.wire.addresses import endpoint


def check(config: ServiceConfig) -> None:
    """Checks a configuration on this machine. Raises StartupError for the first of `refusals`."""
    for error in refusals(config, binding.usable_cpus(), binding.nodes()):
        raise error


def refusals(
    config: ServiceConfig, usable: tuple[int, ...], of_nodes: Mapping[int, Sequence[int]]
) -> Iterator[StartupError]:
    """Yields the errors for which a service, or the stack, would not start.

    usable, of_nodes: the processors of the machine.
    """

    def place() -> object:
        if not isinstance(config, ServeConfig):
            return binding.place_of(config, usable, of_nodes)
        names = local_executors.names(config)
        return binding.places(config, len(names), usable, of_nodes) if names else None

    checks: list[Callable[[], object]] = [place]
    if isinstance(config, ExecutorConfig):
        checks.append(lambda: Speculation.of(config))
    if isinstance(config, ServeConfig):
        checks.append(lambda: _check_ports(config))
    for one in checks:
        try:
            one()
        except StartupError as error:
            yield error


def _check_ports(config: ServeConfig) -> None:
    """Raises StartupError for a port that is given twice: while nothing listens yet, it looks free each time."""
    flags: dict[str, str] = {}
    for flag, host, port in (
        ("--port", config.host, config.port),
        ("--grpc-port", config.host, config.grpc_port),
        ("--scheduler-grpc-port", config.host, config.scheduler_grpc_port),
        ("--admin-port", config.admin_host, config.admin_port),
        ("--metrics-port", config.admin_host, config.metrics_port),
    ):
        address = endpoint(host, port) if port else ""  # 0 is chosen when it starts
        if address and (other := flags.setdefault(address, flag)) != flag:
            raise StartupError(f"{other} and {flag} are both {address}: give each its own port")

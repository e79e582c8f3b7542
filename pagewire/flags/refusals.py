"""Checks of flags in combination, which commands make before they start anything; `--show-config` and `pagewire doctor`
make the same checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from pagewire.config import ExecutorConfig, ServeConfig, ServiceConfig
from pagewire.config.speculation import Speculation
from pagewire.errors import StartupError
from pagewire.flags import ports
from pagewire.process import binding, local_executors


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
        checks.append(lambda: ports.check(config))
    for one in checks:
        try:
            one()
        except StartupError as error:
            yield error

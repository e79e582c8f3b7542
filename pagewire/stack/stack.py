"""`pagewire serve`: the four services as processes of this machine, joined by unix sockets."""

import asyncio
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pagewire.config import GatewayConfig, ServeConfig
from pagewire.errors import StartupError
from pagewire.files.writing import unwritable
from pagewire.flags import refusals
from pagewire.flags.lines import StackModels, models_of
from pagewire.flags.ports import available_ports
from pagewire.process.socket_directory import check_socket_directory
from pagewire.process.supervisor import Service, Supervisor
from pagewire.stack import launch, running
from pagewire.stack.banner import banner, served_model
from pagewire.stack.line_processes import resolved
from pagewire.stack.line_services import address_of, beside, line_services, names_of
from pagewire.stack.lines.lines import Lines
from pagewire.stack.stack_lines import StackLines
from pagewire.telemetry import logs
from pagewire.wire.addresses import is_loopback
from pagewire.wire.local import unix_sockets

logger = logging.getLogger(__name__)

# The name of the socket of LineService.
_LINES = "lines"


def run(config: ServeConfig) -> int:
    """Serves until a signal, and returns the exit code. Raises StartupError if the stack cannot start."""
    started = time.monotonic()
    logs.setup("serve", config)
    refusals.check(config)
    models = models_of(config)
    with _sockets(config.uds_dir, [*names_of(models.lines[0].config), _LINES]) as directory:
        base = config
        config, models, found = _resolved_models(config, models, directory)
        _warn_of_plain_text(config)
        address = address_of(directory, _LINES)
        supervisor = Supervisor(
            [_gateway(config, directory, address)],
            shutdown_timeout=config.time_to_end,
            hang_timeout=config.hang_timeout,
        )

        def announce(lines: Lines) -> None:
            first = lines.lines[0]
            model = served_model(first.processes.address) if first.settings.is_pinned else None
            others = [line.name for line in lines.lines[1:] if line.settings.is_pinned]
            on_request = [line.name for line in lines.lines if not line.settings.is_pinned]
            print(banner(config, model, time.monotonic() - started, others, on_request), flush=True)

        local = address_of(directory, "tokenizer") if config.ssl_certfile else ""
        names = [name for line in models.lines for name in line.names]
        with running.announced(config, shared=True, local=local, names=names, lines=address) as listed:
            stack = StackLines(base, models, found, supervisor, directory, address)
            return asyncio.run(stack.run(announce, listed))


def run_for(
    config: ServeConfig, work: Callable[[ServeConfig], Coroutine[None, None, int]], *, with_rest: bool = True
) -> int:
    """Serves while `work` runs, which starts once all is ready and gets the configuration with the ports.

    Returns the exit code of `work`, or 130 if a signal came first. with_rest: starts a gateway. Raises StartupError,
    also that of `work`.
    """
    logs.setup("serve", config)
    refusals.check(config)
    if config.models or config.other_models:
        raise StartupError("this command serves one model: name it alone, or start several by `pagewire serve`")
    with _sockets(config.uds_dir, names_of(config)) as directory:
        given, config = config, _resolved(config, directory)
        supervisor = Supervisor(
            services(config, directory, given)[0 if with_rest else 1 :],
            shutdown_timeout=config.time_to_end,
            hang_timeout=config.hang_timeout,
        )
        return asyncio.run(_serve_for(supervisor, lambda: work(config)))


async def _serve_for(supervisor: Supervisor, work: Callable[[], Coroutine[None, None, int]]) -> int:
    ready = asyncio.Event()

    async def until_stopped() -> int:
        await ready.wait()
        working, stopping = asyncio.create_task(work()), asyncio.create_task(supervisor.wait_stopping())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        supervisor.stop()
        stopping.cancel()
        working.cancel()
        await asyncio.wait({working})
        return 130 if working.cancelled() else working.result()

    serving_for = asyncio.create_task(until_stopped())
    try:
        await supervisor.run(ready.set)
    finally:
        if not ready.is_set():
            serving_for.cancel()
        await asyncio.wait({serving_for})
    return 130 if serving_for.cancelled() else serving_for.result()


def _resolved_models(
    config: ServeConfig, models: StackModels, directory: Path
) -> tuple[ServeConfig, StackModels, dict[str, ServeConfig]]:
    """Returns the flags of the stack, its models, and by their names the configurations of those that are pinned, with
    names, files and ports resolved. Raises StartupError.

    directory: that of the sockets.
    """
    found = {line.name: resolved(line.config) for line in models.lines if line.is_pinned}
    first = models.lines[0]
    config = _with_ports(found.get(first.name, first.config), directory)
    ports: dict[str, Any] = {
        "port": config.port,
        "grpc_port": config.grpc_port,
        "scheduler_grpc_port": config.scheduler_grpc_port,
    }
    if first.name in found:
        found[first.name] = replace(found[first.name], **ports)
    first = replace(first, config=replace(first.config, **ports))
    return config, replace(models, lines=(first, *models.lines[1:])), found


def _resolved(config: ServeConfig, directory: Path) -> ServeConfig:
    """Returns the configuration with names, files and ports resolved. Raises StartupError.

    directory: that of the sockets.
    """
    return _with_ports(resolved(config), directory)


def _with_ports(config: ServeConfig, directory: Path) -> ServeConfig:
    return replace(
        config,
        **available_ports(config),
        # A later start would not find the data of a random port again.
        data_dir=config.data_dir or (None if config.port else str(directory / "data")),
    )


def _warn_of_plain_text(config: ServeConfig) -> None:
    if (config.api_key or config.api_key_file) and not config.ssl_certfile and not is_loopback(config.host):
        logger.warning(
            "keys are sent unencrypted to %s: serve with TLS (--ssl-certfile), or on loopback (--host 127.0.0.1) "
            "behind a proxy with TLS",
            config.host or "every address",
        )


def services(config: ServeConfig, directory: Path, given: ServeConfig | None = None) -> list[Service]:
    """Returns every process of a stack with one model, in the order in which they are stopped.

    given: the configuration before it was resolved, for other machines, which have their own files.
    """
    return [_gateway(config, directory), *line_services(config, directory, given)]


def _gateway(config: ServeConfig, directory: Path, lines: str | None = None) -> Service:
    """Returns the service of all gateway processes. lines: the address of LineService."""
    tokenizer = address_of(directory, "tokenizer")
    part = config.part(GatewayConfig, tokenizer_address=tokenizer, lines_address=lines, **beside(config))
    return launch.service("gateway", part, partial(launch.http_ready, config))


@contextmanager
def _sockets(given: str | None, names: Sequence[str] = ("tokenizer", "scheduler", "executor")) -> Iterator[Path]:
    """Yields the private directory for the unix sockets of these processes; a new one unless one is given."""
    if given is None:
        with tempfile.TemporaryDirectory(prefix="pagewire-", ignore_cleanup_errors=True) as name:
            _check_sockets(Path(name), names)
            yield Path(name)
        return
    directory = Path(given).expanduser().resolve()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(f"--uds-dir {directory}", error) from error
    _check_sockets(directory, names)
    directory.chmod(0o700)
    try:
        yield directory
    finally:
        for name in names:
            for suffix in ("", unix_sockets.STREAM_SUFFIX):  # a killed service leaves them
                unix_sockets.remove(directory / f"{name}.sock{suffix}")


def _check_sockets(directory: Path, names: Sequence[str]) -> None:
    check_socket_directory(directory, names)
    for name in names:
        with socket.socket(socket.AF_UNIX) as sock:
            if sock.connect_ex(str(directory / f"{name}.sock")) == 0:
                raise StartupError(f"--uds-dir {directory}: another stack uses it; give each stack its own directory")

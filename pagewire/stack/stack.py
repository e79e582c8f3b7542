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

from pagewire.config import (
    GatewayConfig,
    RayExecutorsConfig,
    SchedulerConfig,
    ServeConfig,
    ServiceConfig,
    TokenizerConfig,
)
from pagewire.errors import StartupError
from pagewire.files.models import default_served_name, find_model
from pagewire.files.writing import unwritable
from pagewire.flags import refusals
from pagewire.flags.ports import available_ports
from pagewire.process import binding, cpu_sets, local_executors
from pagewire.process.socket_directory import check_socket_directory, socket_names
from pagewire.process.supervisor import Service, Supervisor
from pagewire.stack import launch, running
from pagewire.stack.banner import banner, served_model
from pagewire.telemetry import logs
from pagewire.wire.addresses import endpoint, is_loopback
from pagewire.wire.discovery.file import has_addresses
from pagewire.wire.local import unix_sockets

logger = logging.getLogger(__name__)

_FULL_NAMES = {
    "tokenizer": "pagewire.v1.InferenceService",
    "scheduler": "pagewire.v1.SchedulerService",
    "executor": "pagewire.v1.ExecutorService",
}
# The file of addresses of executors on a Ray cluster, in the directory of the sockets.
_ADDRESSES = "executors.txt"


def run(config: ServeConfig) -> int:
    """Serves until a signal, and returns the exit code. Raises StartupError if the stack cannot start."""
    started = time.monotonic()
    logs.setup("serve", config)
    refusals.check(config)
    with _sockets(config.uds_dir, names_of(config)) as directory:
        given, config = config, _resolved(config, directory)
        _warn_of_plain_text(config)

        def announce() -> None:
            model = served_model(_address(directory, "tokenizer"))
            print(banner(config, model, time.monotonic() - started), flush=True)

        supervisor = Supervisor(
            services(config, directory, given), shutdown_timeout=config.time_to_end, hang_timeout=config.hang_timeout
        )
        local = _address(directory, "tokenizer") if config.ssl_certfile else ""
        with running.announced(config, shared=True, local=local):
            return asyncio.run(supervisor.run(announce))


def run_for(
    config: ServeConfig, work: Callable[[ServeConfig], Coroutine[None, None, int]], *, with_rest: bool = True
) -> int:
    """Serves while `work` runs, which starts once all is ready and gets the configuration with the ports.

    Returns the exit code of `work`, or 130 if a signal came first. with_rest: starts a gateway. Raises StartupError,
    also that of `work`.
    """
    logs.setup("serve", config)
    refusals.check(config)
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


def _resolved(config: ServeConfig, directory: Path) -> ServeConfig:
    """Returns the configuration with names, files and ports resolved. Raises StartupError.

    directory: that of the sockets.
    """
    served_name = config.served_model_name or default_served_name(config.model)
    config = replace(config, served_model_name=served_name, model=str(find_model(config)), revision=None, gguf=None)
    refusals.check(config)  # a model that was just downloaded may refuse flags
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
    """Returns every process of the stack, in the order in which they are stopped.

    given: the configuration before it was resolved, for other machines, which have their own files.
    """
    on_ray = config.distributed_executor_backend == "ray"
    executors = local_executors.names(config)
    address = {name: _address(directory, name) for name in names_of(config)}
    public = endpoint(config.host, config.grpc_port)
    places = binding.places(config, len(executors), cpu_sets.usable_cpus(), binding.nodes()) if executors else None
    beside: dict[str, Any] = {"cpu_bind": None if places is None else places.others.flags["cpu_bind"]}
    gateway = config.part(GatewayConfig, tokenizer_address=address["tokenizer"], **beside)
    tokenizer = config.part(
        TokenizerConfig,
        listen=address["tokenizer"],
        public_listen=public,
        public_admin=config.admin_port is None,
        scheduler_address=address["scheduler"],
        metrics_port=None,
        **beside,
    )
    tokens = "" if config.scheduler_grpc_port is None else endpoint(config.host, config.scheduler_grpc_port)
    scheduler = config.part(
        SchedulerConfig,
        listen=address["scheduler"],
        public_listen=tokens,
        executor_discovery="file" if on_ray else "static",
        executor_address=str(directory / _ADDRESSES) if on_ray else ",".join(address[name] for name in executors),
        metrics_port=None,
        **beside,
    )

    def grpc_service(kind: str, part: ServiceConfig, name: str = "", **environment: str) -> Service:
        ready = partial(launch.grpc_ready, address[name or kind], _FULL_NAMES[kind])
        service = launch.service(kind, part, ready, name=name)
        return replace(service, environment={**service.environment, **environment})

    return [
        launch.service("gateway", gateway, partial(launch.http_ready, config)),
        grpc_service("tokenizer", tokenizer),
        grpc_service("scheduler", scheduler),
        *_ray_executors(config, directory, given or config),
        *(
            grpc_service("executor", local_executors.part(config, address[name], place, role), name, **devices)
            for name, devices, place, role in zip(
                executors,
                local_executors.devices(config),
                _places_of(places, len(executors)),
                local_executors.roles(config),
                strict=True,
            )
        ),
    ]


def _places_of(places: binding.CpuBindings | None, count: int) -> Sequence[binding.CpuBinding | None]:
    """Returns the place of each executor, and logs the places."""
    if places is None:
        return [None] * count
    for name, place in (*((f"executor {i}", p) for i, p in enumerate(places.executors)), ("others", places.others)):
        node = "" if place.node is None else f" of NUMA node {place.node}"
        logger.info("%s: processors %s%s", name, cpu_sets.cpu_text(place.cpus) or "not bound", node)
    return places.executors


def _ray_executors(config: ServeConfig, directory: Path, given: ServeConfig) -> list[Service]:
    """Returns the process that keeps executors on a Ray cluster, if they run there; it is ready once one of them is."""
    if config.distributed_executor_backend != "ray":
        return []
    addresses = directory / _ADDRESSES
    if not Path(given.model).expanduser().exists():  # a hub id, which each node resolves itself
        config = replace(config, model=given.model, revision=given.revision)
    part = config.part(
        RayExecutorsConfig, address_file=str(addresses), metrics_port=None, distributed_executor_backend="mp"
    )

    async def ready() -> bool:
        return has_addresses(addresses)

    return [launch.service("ray-executors", part, ready)]


def names_of(config: ServeConfig) -> list[str]:
    """Returns the names of the processes with a socket on this machine."""
    return socket_names(local_executors.names(config))


def _address(directory: Path, service: str) -> str:
    return f"unix:{directory}/{service}.sock"


@contextmanager
def _sockets(given: str | None, names: Sequence[str] = tuple(_FULL_NAMES)) -> Iterator[Path]:
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

"""An executor on a node of a Ray cluster."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import ray

import pagewire
from pagewire import launch, logs
from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.process import raise_descriptor_limit
from pagewire.supervisor import Service, Supervisor

_SERVICE = "pagewire.v1.ExecutorService"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is to run. node, user: of the keeper: an executor beside it is reached by a unix socket.

    command: arguments of Python that take the place of `-m pagewire.cli executor` and its flags, if there are any;
    LISTEN stands for the addresses to listen on.
    """

    name: str
    config: ExecutorConfig
    node: str
    user: int
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = pagewire.__version__
    command: tuple[str, ...] = ()


class ExecutorActor:
    """Keeps an executor's process running where Ray has put it, as `pagewire serve` does on its own machine.

    The process is a child, not this one: the device's threads, signals and gRPC are then exactly those of every other
    executor, one that hangs is found out and killed, and its successor learns how it ended. It dies with this process,
    so whatever Ray ends is ended.
    """

    def __init__(self, spec: Spec) -> None:
        """Raises StartupError if this node has another version of Pagewire."""
        if spec.version != pagewire.__version__:
            raise StartupError(
                f"the node {ray.util.get_node_ip_address()} has Pagewire {pagewire.__version__}, not {spec.version} as "
                "where it is served from: install the same version on all nodes"
            )
        logs.setup("ray-actor", spec.config)
        raise_descriptor_limit()
        self._directory = tempfile.TemporaryDirectory(prefix="pagewire-", ignore_cleanup_errors=True)
        self._socket = f"unix:{self._directory.name}/executor.sock"
        self._address = self._socket if _is_beside(spec) else _free_address()
        self._supervisor = Supervisor(
            [self._service(spec)],
            shutdown_timeout=spec.config.shutdown_timeout,
            hang_timeout=spec.config.hang_timeout,
            takes_signals=False,
        )
        self._running: asyncio.Task[int] | None = None
        self._ready = asyncio.Event()

    def _service(self, spec: Spec) -> Service:
        # Whether it is ready is asked at the socket, which needs no certificates.
        listen = ",".join(dict.fromkeys([self._socket, self._address]))
        config = replace(spec.config, listen=listen)
        service = launch.service("executor", config, partial(launch.grpc_ready, self._socket, _SERVICE), name=spec.name)
        if spec.command:
            command = [listen if part == "LISTEN" else part for part in spec.command]
            service = replace(service, command=[sys.executable, *command])
        # Ray means its own tasks, which share a node's cores; --num-threads says what an executor may use.
        environment = {name: value for name, value in service.environment.items() if name != "OMP_NUM_THREADS"}
        return replace(service, environment={**environment, **spec.environment})

    async def address(self) -> str:
        """Where the executor is, or will be."""
        return self._address

    async def run(self) -> None:
        """Until stop(). Raises StartupError if the executor cannot start here. A second call joins the first."""
        if self._running is None or (self._running.done() and self._running.exception()):
            self._running = asyncio.create_task(self._supervisor.run(self._ready.set))
        await asyncio.shield(self._running)

    async def ready(self) -> None:
        """Until the executor is, for the first time."""
        await self._ready.wait()

    async def stop(self) -> None:
        """Has it drain and end."""
        self._supervisor.stop()
        if self._running is not None:
            await asyncio.wait({self._running})
        self._directory.cleanup()


def _is_beside(spec: Spec) -> bool:
    return ray.get_runtime_context().get_node_id() == spec.node and os.geteuid() == spec.user


def _free_address() -> str:
    host = ray.util.get_node_ip_address()
    return launch.endpoint(host, launch.available_port(host, 0, "the node's address"))

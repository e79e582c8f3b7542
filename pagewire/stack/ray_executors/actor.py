"""An executor on a node of a Ray cluster."""

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import ray

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.flags.ports import available_port
from pagewire.process.process import raise_descriptor_limit
from pagewire.process.supervisor import Service, Supervisor
from pagewire.stack import launch
from pagewire.telemetry import logs
from pagewire.version import __version__
from pagewire.wire.addresses import endpoint

_SERVICE = "pagewire.v1.ExecutorService"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The executor, or the stage of one, that an actor runs.

    node, user: those of the keeper; an executor on the same node is reached by a unix socket. place: the number of the
    stage, counted from the last, of the actor; number 0 has the leader. command: arguments of Python that replace `-m
    pagewire.cli executor` and its flags, if there are any; LISTEN stands for the addresses to listen on.
    """

    name: str
    config: ExecutorConfig
    node: str
    user: int
    place: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    version: str = __version__
    command: tuple[str, ...] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that the actor starts. The leader of an executor without stages starts the other ranks itself."""
        size = self.config.tensor_parallel_size
        if self.config.pipeline_parallel_size == 1:
            return (0,)
        return range(self.place * size, (self.place + 1) * size)


@dataclass(frozen=True)
class Whereabouts:
    """The place of an actor. machine: equal for actors that can share memory and sockets."""

    machine: tuple[str, int]
    address: str  # of the executor, if this is the leader's


class ExecutorActor:
    """Keeps the processes of an executor, or of one of its stages, running on a node that Ray chose.

    The executor runs in child processes: threads, signals and gRPC then work exactly as in every other executor, a
    process that hangs is killed, and its successor learns how it ended. Children die with this process, so Ray can end
    everything.
    """

    def __init__(self, spec: Spec) -> None:
        """Raises StartupError if this node has another version of Pagewire."""
        if spec.version != __version__:
            raise StartupError(
                f"the node {ray.util.get_node_ip_address()} has Pagewire {__version__}, but the "
                f"serving machine has {spec.version}: install the same version on all nodes"
            )
        logs.setup("ray-actor", spec.config)
        raise_descriptor_limit()
        self._spec = spec
        self._node = ray.get_runtime_context().get_node_id()
        self._directory = tempfile.TemporaryDirectory(prefix="pagewire-", ignore_cleanup_errors=True)
        self._socket = f"unix:{self._directory.name}/executor.sock"
        is_beside = self._node == spec.node and os.geteuid() == spec.user
        self._address = self._socket if is_beside else _free_address()
        self._supervisor: Supervisor | None = None
        self._running: asyncio.Task[int] | None = None
        self._ready = asyncio.Event()

    async def whereabouts(self) -> Whereabouts:
        return Whereabouts((self._node, os.geteuid()), self._address)

    async def meeting_point(self, on_one_machine: bool) -> str:
        """Returns the address at which the leader listens for the ranks of all stages.

        on_one_machine: all ranks are on this machine.
        """
        return f"unix:{self._directory.name}/leader.sock" if on_one_machine else _free_address()

    async def run(self, leader: str = "", cpu_share: float = 1.0) -> None:
        """Runs the executor until stop(). Raises StartupError if it cannot start here. A second call joins the first.

        leader: the address from `meeting_point`. cpu_share: the share of each rank in that of the executor.
        """
        if self._running is None or (self._running.done() and self._running.exception()):
            self._supervisor = self._supervise(leader, cpu_share)
            self._running = asyncio.create_task(self._supervisor.run(lambda: None))
        await asyncio.shield(self._running)

    def _supervise(self, leader: str, cpu_share: float) -> Supervisor:
        config = self._spec.config
        config = replace(config, leader=leader, cpu_share=config.cpu_share * cpu_share)
        return Supervisor(
            [self._service(replace(config, rank=rank)) for rank in self._spec.ranks],
            shutdown_timeout=config.shutdown_timeout,
            stop_together=True,  # the leader ends the other ranks after the last request
            hang_timeout=config.hang_timeout,
            takes_signals=False,
        )

    def _service(self, config: ExecutorConfig) -> Service:
        # Readiness is checked at the socket, which needs no certificates.
        leads = ",".join(dict.fromkeys([self._socket, self._address]))
        listen = ExecutorConfig.listen if config.rank else leads  # that of the leader is not for the other ranks
        ready = self._has_started if config.rank else self._leads
        name = f"{self._spec.name} rank {config.rank}" if config.leader else self._spec.name
        service = launch.service("executor", replace(config, listen=listen), ready, name=name)
        if self._spec.command:
            command = [listen if part == "LISTEN" else part for part in self._spec.command]
            service = replace(service, command=[sys.executable, *command])
        # Ray sets OMP_NUM_THREADS for its own tasks; an executor uses --num-threads.
        environment = {name: value for name, value in service.environment.items() if name != "OMP_NUM_THREADS"}
        return replace(service, environment={**environment, **self._spec.environment})

    async def _leads(self) -> bool:
        if await launch.grpc_ready(self._socket, _SERVICE):
            self._ready.set()
        return self._ready.is_set()

    async def _has_started(self) -> bool:
        return self._ready.is_set()

    async def ready(self) -> None:
        """Waits until the executor is ready for the first time. Call it on the actor of the leader."""
        await self._ready.wait()

    async def started(self) -> None:
        """Records that the executor was ready: from now on, the end of a rank does not end the stack."""
        self._ready.set()

    async def stop(self) -> None:
        """Drains the executor and ends it."""
        if self._supervisor is not None and self._running is not None:
            self._supervisor.stop()
            await asyncio.wait({self._running})
        self._directory.cleanup()


def _free_address() -> str:
    host = ray.util.get_node_ip_address()
    return endpoint(host, available_port(host))

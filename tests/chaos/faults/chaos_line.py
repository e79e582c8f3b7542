"""A line with fast starts, a proxy before each process, and a small disk of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagewire.wire import rpc
from tests.chaos.faults.proxy import Proxy
from tests.e2e.line import FULL_NAMES, REPOSITORY, free_port, http_client

START_TIMEOUT_S = 120.0
# As a supervisor would, before it starts one again that has ended by itself.
BACKOFF_S = 0.2
MODULES = ["pagewire.gateway.main", "pagewire.services.tokenizer.main", "pagewire.services.scheduler.main"]


class ChaosLine:
    """A line: client -> gateway or sister -> tokenizer -> scheduler -> one or several executors, each behind a
    proxy."""

    def __init__(
        self, directory: Path, model: Path, executors: dict[str, list[str]], module: str, hang_timeout: float
    ) -> None:
        """executors: name -> command and flags, but for those that every service has. module: to be imported for it."""
        self.directory = directory
        self.executors = executors
        self.services = ["gateway", "sister", "tokenizer", "scheduler", *executors]
        self.hang_timeout = hang_timeout
        self.has_disk = False
        self.pids: dict[str, int] = {}  # of those that live
        self.deaths: list[str] = []  # that no test has caused
        self._model = model
        self._module = module
        self._killed: set[int] = set()
        self._starting = {service: asyncio.Lock() for service in self.services}
        self._is_stopping = False
        self._ports = {name: (free_port(), free_port()) for name in ("gateway", "sister")}
        self.proxies = {name: self._proxy(name) for name in self.services}
        self._fork_server: asyncio.subprocess.Process | None = None
        self._changed = asyncio.Condition()
        self._events: list[dict[str, Any]] = []
        self._tasks: list[asyncio.Task[None]] = []

    # -- where things are --------------------------------------------------------------------------------------------

    @property
    def base_urls(self) -> list[str]:
        """Returns the URLs of the gateways, behind their proxies."""
        return [f"http://127.0.0.1:{inner}" for inner, _ in self._ports.values()]

    def _address(self, service: str, side: str = "") -> str:
        """side: "i" for the proxy in front of it."""
        return f"unix:{self.directory}/{service}{side}.sock"

    def _proxy(self, service: str) -> Proxy:
        if service in self._ports:
            inner, outer = self._ports[service]
            return Proxy(("127.0.0.1", inner), ("127.0.0.1", outer))
        return Proxy(self._address(service, "i"), self._address(service))

    def _argv(self, service: str) -> list[str]:
        common = ["--hang-timeout", str(self.hang_timeout)]
        listen = ["--listen", self._address(service)]
        if service in self._ports:
            where = ["--port", str(self._ports[service][1]), "--data-dir", str(self.directory / "disk" / "data")]
            return ["gateway", *where, "--tokenizer-address", self._address("tokenizer", "i"), *common]
        if service == "tokenizer":
            model = ["--model", str(self._model), "--served-model-name", "m"]
            return ["tokenizer", *listen, *model, "--scheduler-address", self._address("scheduler", "i"), *common]
        if service == "scheduler":
            addresses = ",".join(self._address(name, "i") for name in self.executors)
            # A forecast that learns from hangs is too long, and a refusal is not what is looked for here.
            admission = ["--max-queue-time", "0"]
            return ["scheduler", *listen, "--executor-address", addresses, *admission, *common]
        return [*self.executors[service], *listen, "--model", str(self._model), *common]

    def log(self, service: str) -> Path:
        return self.directory / f"{service}.log"

    # -- processes ---------------------------------------------------------------------------------------------------

    async def start(self, service: str) -> None:
        """Does nothing if it lives."""
        message = {"start": service, "argv": self._argv(service), "log": str(self.log(service))}
        async with self._starting[service]:  # faults may overlap
            if service not in self.pids:
                await self._ask(message, started=service)

    async def end(self, service: str, number: signal.Signals) -> None:
        """SIGKILL or SIGTERM, until it has ended; does nothing if it is dead."""
        pid = self.pids.get(service)
        if pid is not None:
            self._killed.add(pid)
            self.signal(service, number)
            async with self._changed:
                await self._changed.wait_for(lambda: self.pids.get(service) != pid)

    def signal(self, service: str, number: signal.Signals, pid: int | None = None) -> None:
        """Kills a service. pid: only if that is still its process."""
        alive = self.pids.get(service)
        if alive is not None and pid in (None, alive):
            with suppress(ProcessLookupError):
                os.kill(alive, number)

    async def heal(self) -> None:
        """Whatever was done to it, it may go on."""
        for proxy in self.proxies.values():
            proxy.mend()
        await self.fill_disk(False)
        for service in self.services:
            self.signal(service, signal.SIGCONT)
            await self.start(service)

    async def fill_disk(self, is_full: bool) -> None:
        await self._ask({"fill": is_full}, filled=is_full)

    async def _ask(self, message: dict[str, Any], **answer: object) -> None:
        assert self._fork_server is not None and self._fork_server.stdin is not None
        self._fork_server.stdin.write(json.dumps(message).encode() + b"\n")
        await self._received(**answer)

    async def _received(self, **answer: object) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            return next((event for event in self._events if answer.items() <= event.items()), None)

        async with self._changed:
            event = await self._changed.wait_for(lambda: found() or self._fork_server is None)
            if not isinstance(event, dict):
                raise RuntimeError(f"the fork server has ended: see {self.directory}/fork_server.log")
            self._events.remove(event)
            return event

    async def _listen(self) -> None:
        assert self._fork_server is not None and self._fork_server.stdout is not None
        stdout = self._fork_server.stdout
        while line := await stdout.readline():
            event = json.loads(line)
            async with self._changed:
                if "started" in event:
                    self.pids[event["started"]] = event["pid"]
                if "ended" in event:
                    self._on_end(event["ended"], event["pid"], event["status"])
                else:
                    self._events.append(event)
                self._changed.notify_all()
        async with self._changed:
            self._fork_server = None
            self._changed.notify_all()

    def _on_end(self, service: str, pid: int, status: int) -> None:
        if self.pids.get(service) == pid:
            del self.pids[service]
        if pid not in self._killed and not self._is_stopping:
            self.deaths.append(f"{service} ended by itself with {status}; see {self.log(service)}")
            self._tasks.append(asyncio.create_task(self._start_again(service)))

    async def _start_again(self, service: str) -> None:
        await asyncio.sleep(BACKOFF_S)
        await self.start(service)

    # -- readiness ---------------------------------------------------------------------------------------------------

    async def wait_settled(self, timeout: float) -> None:
        """Waits until every service is ready, nothing runs or waits and every block is free. Raises TimeoutError."""
        deadline = time.monotonic() + timeout
        while unready := await self._why_unready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"it does not settle: {unready}")
            await asyncio.sleep(0.02)

    async def _why_unready(self) -> str:
        for service in self.services:
            if service not in self.pids:
                return f"{service} does not run"
        for base_url in self.base_urls:
            async with http_client(timeout=5) as client:
                try:
                    answer = await client.get(f"{base_url}/readyz")
                except httpx.HTTPError as error:
                    return f"{base_url}: {error!r}"
            if answer.status_code != 200:
                return f"{base_url}: {answer.text}"
        for service in self.executors:
            if problem := await self._why_not_serving(service):
                return problem
        try:
            load = await self._load()
        except grpc.aio.AioRpcError as error:
            return f"the scheduler does not answer: {error.details()}"
        if load.num_executors < len(self.executors):
            return f"{load.num_executors} executors are there"
        if load.num_running or load.num_waiting or load.num_free_blocks < load.num_blocks:
            return f"it is not idle: {str(load).replace(chr(10), ' ')}"
        return ""

    async def _why_not_serving(self, service: str) -> str:
        request = health_pb2.HealthCheckRequest(service=FULL_NAMES["executor"])
        async with rpc.channel(self._address(service)) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
            except grpc.aio.AioRpcError as error:
                return f"{service} does not answer: {error.details()}"
        return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else f"{service} is not ready"

    async def _load(self) -> scheduler_pb2.GetLoadResponse:
        async with rpc.channel(self._address("scheduler")) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=5)

    # -- beginning and end -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        disk = self.directory / "disk"
        disk.mkdir()
        for proxy in self.proxies.values():
            await proxy.start()
        modules = [*MODULES, self._module]
        command = [sys.executable, "-m", "tests.chaos.faults.fork_server", str(disk), str(self._model), *modules]
        unshare = ["unshare", "--user", "--map-root-user", "--mount"]
        probe = await asyncio.create_subprocess_exec(*unshare, "true", stderr=subprocess.DEVNULL)
        can_mount = await probe.wait() == 0
        environment = os.environ | {"CHAOS_UNSHARED": str(int(can_mount))}
        with (self.directory / "fork_server.log").open("wb") as log:
            self._fork_server = await asyncio.create_subprocess_exec(
                *(*unshare, *command) if can_mount else command,
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._tasks.append(asyncio.create_task(self._listen()))
        self.has_disk = (await self._received(ready=True))["disk"]
        for service in reversed(self.services):
            await self.start(service)
        await self.wait_settled(START_TIMEOUT_S)

    async def _close(self) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        if (server := self._fork_server) is not None and server.stdin is not None:
            server.stdin.close()
            await server.wait()
        for proxy in self.proxies.values():
            await proxy.stop()


@asynccontextmanager
async def running(line: ChaosLine) -> AsyncIterator[ChaosLine]:
    try:
        await line._open()
        yield line
    finally:
        await line._close()


def real_line(directory: Path, model: Path, flags: Sequence[str]) -> ChaosLine:
    """One executor with the real model."""
    executors = {"executor": ["executor", *flags]}
    return ChaosLine(directory, model, executors, "pagewire.services.executor.main", hang_timeout=3.0)


def fake_line(directory: Path, model: Path, flags: Sequence[str] = ()) -> ChaosLine:
    """Two fake executors."""
    executors = {name: ["fake-executor", *flags] for name in ("executor0", "executor1")}
    return ChaosLine(directory, model, executors, "tests.chaos.faults.executor", hang_timeout=2.0)

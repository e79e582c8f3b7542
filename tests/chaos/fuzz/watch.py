"""Measures from a process of its own how long a stack keeps others waiting, and how much memory it takes.

    python -m tests.chaos.fuzz.watch URL SERVICE=ADDRESS ...

The addresses are those of public gRPC ports. Each line on standard input is answered with what was measured since the
line before, as JSON. In the process that makes a flood, its own work would be measured as well.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial

import httpx
import psutil
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from pagewire.wire import rpc

_INTERVAL_S = 0.02
_TIMEOUT_S = 60.0


@dataclass
class Measured:
    stall: float = 0.0  # seconds, the longest that an answer took, or has taken so far
    service: str = ""  # that took it
    memory: int = 0  # bytes that a process has in addition to those that it had at first, at most
    errors: list[str] = field(default_factory=list)


class Watch:
    """Measures from one take() to the next."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._measured = Measured()
        self._asked: dict[str, float] = {}
        self._processes = {psutil.Process(pid): psutil.Process(pid).memory_info().rss for pid in pids.values()}

    async def look(self, service: str, ask: Callable[[], Awaitable[object]]) -> None:
        """Asks a service again and again."""
        while True:
            self._asked[service] = time.monotonic()
            try:
                await ask()
            except Exception as error:  # of any client library
                self._measured.errors.append(f"{service}: {error!r}")
            self._note(service)
            try:
                grown = max(process.memory_info().rss - first for process, first in self._processes.items())
                self._measured.memory = max(self._measured.memory, grown)
            except psutil.NoSuchProcess as error:
                self._measured.errors.append(repr(error))
            await asyncio.sleep(_INTERVAL_S)

    def take(self) -> Measured:
        for service in self._asked:
            self._note(service)
        measured, self._measured = self._measured, Measured()
        return measured

    def _note(self, service: str) -> None:
        if (took := time.monotonic() - self._asked[service]) > self._measured.stall:
            self._measured.stall, self._measured.service = took, service


async def main(url: str, addresses: Mapping[str, str]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as http:
        watch = Watch(await processes(http))
        asks: dict[str, Callable[[], Awaitable[object]]] = {"gateway": lambda: http.get("/livez")}
        for service, address in addresses.items():
            stub = HealthStub(rpc.channel(address))
            asks[service] = partial(stub.Check, HealthCheckRequest(), timeout=_TIMEOUT_S)
        looking = [asyncio.create_task(watch.look(service, ask)) for service, ask in asks.items()]
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(asdict(watch.take())), flush=True)
        await rpc.cancel(looking)


async def processes(http: httpx.AsyncClient) -> dict[str, int]:
    """Returns process ids by service."""
    return {one["service"]: one["pid"] for one in (await http.get("/v1/status")).json()["services"]}


@asynccontextmanager
async def watched(url: str, addresses: Mapping[str, str]) -> AsyncIterator[Callable[[], Awaitable[Measured]]]:
    """Watches a stack, and yields the function that returns what was measured since its previous call."""
    arguments = [url, *(f"{service}={address}" for service, address in addresses.items())]
    watching = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert watching.stdin is not None and watching.stdout is not None
    asking, answering = watching.stdin, watching.stdout

    async def take() -> Measured:
        asking.write(b"\n")
        return Measured(**json.loads(await answering.readline()))

    try:
        await take()  # it runs
        yield take
    finally:
        asking.close()
        await watching.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], dict(one.split("=", 1) for one in sys.argv[2:])))  # type: ignore[arg-type]

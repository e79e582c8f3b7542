"""The four services as real processes on unix sockets, each of which a test can kill, stop and start by itself."""

import asyncio
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from openai import AsyncOpenAI

from pagewire.v1 import inference_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from pagewire.wire import rpc
from tests.e2e.forked import PAUSE, Forked

REPOSITORY = Path(__file__).parents[2]
FULL_NAMES = {
    "tokenizer": "pagewire.v1.InferenceService",
    "scheduler": "pagewire.v1.SchedulerService",
    "executor": "pagewire.v1.ExecutorService",
}
START_TIMEOUT_S = 120.0
# What plain HTTP needs: a client that is given none reads the machine's certificates, which takes 30 ms of a processor.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_MODEL_NAME = re.compile(r'model_name="[^"]*",')


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def http_client(**options: Any) -> httpx.AsyncClient:
    """Returns a client of plain HTTP, or of what `verify` says, which starts at once."""
    return httpx.AsyncClient(**{"verify": NO_CERTIFICATES} | options)


class Line:
    """A line for one model: gateway -> tokenizer -> scheduler -> executor."""

    def __init__(self, directory: Path, model: str, **flags: list[str]) -> None:
        """flags: further arguments by service name, for instance executor=["--dtype", "float32"]."""
        self.directory = directory
        self.model = model
        self.flags = flags
        self.environment: dict[str, str] = {}  # of the processes, beside that of the tests
        self.port = free_port()
        self.sister_port = free_port()
        self.verify = NO_CERTIFICATES  # how REST's certificate is checked
        self.processes: dict[str, Forked | subprocess.Popen[bytes]] = {}

    def address(self, service: str) -> str:
        return f"unix:{self.directory / service}.sock"

    def channel(self, service: str) -> grpc.aio.Channel:
        return rpc.channel(self.address(service))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def sister_url(self) -> str:
        return f"http://127.0.0.1:{self.sister_port}"

    def pid(self, service: str) -> int:
        return self.processes[service].pid

    def log(self, service: str) -> str:
        return (self.directory / f"{service}.log").read_text(errors="replace")

    def _arguments(self, service: str) -> list[str]:
        listen = ["--listen", self.address(service)]
        return {
            "executor": [*listen, "--model", self.model],
            "scheduler": [*listen, "--executor-address", self.address("executor")],
            "tokenizer": [
                *listen,
                "--model",
                self.model,
                "--served-model-name",
                "m",
                "--scheduler-address",
                self.address("scheduler"),
            ],
            "gateway": ["--port", str(self.port), *self._behind_gateways()],
            "sister": ["--port", str(self.sister_port), *self._behind_gateways()],  # a second gateway, if started
        }[service] + self.flags.get(service, [])

    def _behind_gateways(self) -> list[str]:
        return ["--tokenizer-address", self.address("tokenizer"), "--data-dir", str(self.directory / "data")]

    def arguments(self, service: str) -> list[str]:
        """Returns the arguments of `pagewire` that start a service."""
        return [service.replace("sister", "gateway"), *self._arguments(service)]

    def start(self, service: str) -> None:
        log = self.directory / f"{service}.log"
        self.processes[service] = Forked(self.arguments(service), log, self.environment)

    def kill(self, service: str) -> None:
        """Kills a service with SIGKILL, as an out-of-memory killer would."""
        process = self.processes[service]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def restart(self, service: str, *flags: str) -> None:
        """Kills a service with SIGKILL and starts it again, with other flags if given."""
        if flags:
            self.flags[service] = list(flags)
        self.kill(service)
        self.start(service)

    @contextmanager
    def slow_steps(self, seconds: float = 0.005) -> Iterator[None]:
        """Makes the executor's steps take longer, so that streams outlast what a test does to them even if the test has
        to wait for a processor."""
        pause = self.directory / PAUSE
        unfinished = self.directory / f"{PAUSE}.unfinished"
        unfinished.write_text(str(seconds))
        unfinished.rename(pause)
        try:
            yield
        finally:
            pause.unlink()

    async def wait_ready(self, *services: str) -> None:
        """Waits until each of the services (default: all, connected) reports that it can serve."""
        names = services or ("executor", "scheduler", "tokenizer", "gateway")
        deadline = time.monotonic() + START_TIMEOUT_S
        for name in names:
            while not await self._is_ready(name):
                process = self.processes[name]
                if process.poll() is not None:
                    raise RuntimeError(f"{name} exited with {process.returncode}:\n{self.log(name)[-4000:]}")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{name} is not ready:\n{self.log(name)[-4000:]}")
                await asyncio.sleep(0.05)
        # A scheduler that waits for the next executor can serve, too.
        while not services and not (await self.load()).num_executors:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the scheduler has no executor:\n{self.log('scheduler')[-4000:]}")
            await asyncio.sleep(0.05)

    async def _is_ready(self, service: str) -> bool:
        try:
            if service in ("gateway", "sister"):
                base_url = self.base_url if service == "gateway" else self.sister_url
                async with http_client(verify=self.verify) as client:
                    return (await client.get(f"{base_url}/readyz", timeout=5)).status_code == 200
            async with self.channel(service) as channel:
                request = health_pb2.HealthCheckRequest(service=FULL_NAMES[service.removesuffix("2")])
                answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
                return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        except (grpc.aio.AioRpcError, httpx.HTTPError):
            return False

    def openai(self) -> AsyncOpenAI:
        http = http_client(verify=self.verify)
        return AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=180, http_client=http)

    @asynccontextmanager
    async def inference(self) -> AsyncIterator[inference_pb2_grpc.InferenceServiceStub]:
        async with self.channel("tokenizer") as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    @asynccontextmanager
    async def scheduler(self) -> AsyncIterator[scheduler_pb2_grpc.SchedulerServiceStub]:
        async with self.channel("scheduler") as channel:
            yield scheduler_pb2_grpc.SchedulerServiceStub(channel)

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        async with self.scheduler() as stub:
            return await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=10)

    async def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by "name{labels}" as the exposition prints it, without the model's name."""
        async with http_client() as client:
            text = (await client.get(f"{self.base_url}/metrics", timeout=30)).text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {_MODEL_NAME.sub("", name): float(value) for name, value in samples}

    async def wait_blocks(self, num_blocks: int) -> None:
        """Waits until the scheduler has an executor of `num_blocks`; 0: until it has none."""
        for _ in range(600):
            if (await self.load()).num_blocks == num_blocks:
                return
            await asyncio.sleep(0.1)
        raise TimeoutError(f"the scheduler has no executor of {num_blocks} blocks:\n{self.log('scheduler')[-4000:]}")

    async def wait_executors(self, count: int) -> None:
        """Waits until the scheduler has `count` executors."""
        for _ in range(600):
            if (await self.load()).num_executors == count:
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"the scheduler has not {count} executors:\n{self.log('scheduler')[-4000:]}")

    async def wait_idle(self) -> scheduler_pb2.GetLoadResponse:
        """Waits until nothing runs or waits and every block is free; returns the last load seen, also if that does not
        come."""
        for _ in range(100):
            load = await self.load()
            if not load.num_running and not load.num_waiting and load.num_free_blocks == load.num_blocks:
                break
            await asyncio.sleep(0.1)
        return load

    def open_files(self, service: str) -> int:
        return len(list(Path(f"/proc/{self.pid(service)}/fd").iterdir()))

    def stop(self) -> None:
        """SIGTERM from left to right, as the local stack does."""
        order = ("sister", "gateway", "tokenizer", "tokenizer2", "scheduler", "executor", "executor2")
        for process in filter(None, map(self.processes.get, order)):
            if process.poll() is not None:
                continue
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def running_line(directory: Path, model: str, **flags: list[str]) -> Iterator[Line]:
    """A line that is ready. Not bound to an event loop: tests of a whole session share one."""
    line = Line(directory, model, **flags)
    try:
        for service in ("executor", "scheduler", "tokenizer", "gateway"):
            line.start(service)
        asyncio.run(line.wait_ready())
        yield line
    finally:
        line.stop()

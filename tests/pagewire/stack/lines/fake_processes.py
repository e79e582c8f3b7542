"""Processes of a line without processes: they do at once, or when a test lets them, what real ones do."""

import asyncio

from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.flags.lines import LineSettings
from pagewire.stack.lines.line import Load
from pagewire.v1 import inference_pb2


def settings_of(name: str, memory: int = 4, *, is_pinned: bool = False, idle_timeout: float = 0.0) -> LineSettings:
    config = ServeConfig(model=name, served_model_name=name, idle_timeout=idle_timeout, device="cpu")
    return LineSettings(config, is_pinned=is_pinned, memory=memory)


class FakeProcesses:
    """The processes of one line. `log` has what happened, in order; of all lines, if they share it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.address = f"unix:/{name}/tokenizer.sock"
        self.runs = self.sleeps = False
        self.problem = ""  # of the next starts and wakes
        self.damage = ""  # of its files
        self.num_requests, self.idle_seconds = 0, 0.0
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.may_measure = asyncio.Event()
        self.may_measure.set()

    @property
    def waits_for(self) -> list[str]:
        return ["executor"] if self.runs else []

    async def prepare(self) -> None:
        if self.damage:
            raise StartupError(self.damage)

    async def start(self) -> None:
        assert not self.runs
        self.runs = True
        await self._until_allowed("start")

    async def wake(self) -> None:
        assert self.runs
        await self._until_allowed("wake")
        self.sleeps = False

    async def _until_allowed(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        await self.may_start.wait()
        if self.problem:
            raise StartupError(self.problem)

    async def sleep(self) -> None:
        assert self.runs
        while self.num_requests:  # noqa: ASYNC110 - as the scheduler does
            await asyncio.sleep(0)
        self.sleeps = True
        self.log.append(f"sleep {self.name}")

    async def end(self) -> None:
        if self.runs:
            assert not self.num_requests or self.sleeps, "requests are cut off"
            await self.may_end.wait()
            self.log.append(f"end {self.name}")
        self.runs = self.sleeps = False

    async def load(self) -> Load | None:
        return Load(self.num_requests, self.idle_seconds, self.sleeps) if self.runs else None

    async def model(self) -> inference_pb2.Model | None:
        return inference_pb2.Model(id=self.name, max_model_len=7)

    async def memory(self) -> int:
        await self.may_measure.wait()
        return 0

"""One line of the stack: what it does now, what it did, and what went wrong."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagewire.flags.lines import LineSettings
from pagewire.stack.lines.plan import Occupant, Place
from pagewire.stack.lines.sizes import Sizes

if TYPE_CHECKING:
    from pagewire.v1 import inference_pb2

logger = logging.getLogger(__name__)

# Seconds until a line that could not start or wake is tried again: twice as long after each failure.
FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
# A change of the time of the last use that is worth telling.
_USE_S = 0.5
# So often in a row a service has to say that it sleeps, or not, before the stack believes that an operator did that.
_SEEN = 2
_IN_MEMORY = (Place.READY, Place.ASLEEP)


class LineError(Exception):
    """A wish that is refused. code: "unknown", "exists", "invalid" or "refused". retry_after: seconds, if known."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


class Load(NamedTuple):
    """The load of a line, as its tokenizer service tells it."""

    num_requests: int
    idle_seconds: float
    is_asleep: bool


class Processes(Protocol):
    """The processes of a line, as far as it needs them; see LineProcesses."""

    address: str

    @property
    def waits_for(self) -> list[str]: ...
    async def prepare(self) -> None: ...
    async def start(self) -> None: ...
    async def end(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def load(self) -> Load | None: ...
    async def model(self) -> inference_pb2.Model | None: ...
    async def memory(self) -> int: ...


@dataclass(eq=False)
class Line:
    """A line. `Lines` changes it."""

    settings: LineSettings
    processes: Processes
    sizes: Sizes
    place: Place = Place.ABSENT
    problem: str = ""
    retry_at: float = 0.0  # Unix time
    used_at: float = field(default_factory=time.monotonic)
    num_requests: int = 0
    idle_override: float | None = None  # of --idle-timeout; negative: never
    sleeps_until_woken: bool = False
    num_loads: int = 0
    num_failures: int = 0
    num_withdrawals: int = 0  # of wishes for it
    is_leaving: bool = False  # it is being deleted
    is_woken: bool = False  # while it is LOADING: it wakes, and does not start
    notice: str = ""  # what it waits for before it loads
    model: inference_pb2.Model | None = None
    size: int = 0  # bytes of the weights on disk
    # Held while it starts, falls asleep, wakes or ends.
    operation: asyncio.Lock = field(default_factory=asyncio.Lock)
    loading: asyncio.Task[None] | None = None
    preparing: asyncio.Task[None] | None = None  # its files are looked for, before others make room
    _backoff: float = FIRST_BACKOFF_S
    _num_seen: int = 0

    @property
    def name(self) -> str:
        """The first served name."""
        return self.settings.name

    @property
    def idle_timeout(self) -> float | None:
        """Seconds without a request after which it rests; None: it does not."""
        if self.idle_override is None:
            return self.settings.config.idle_timeout or None
        return self.idle_override if self.idle_override >= 0 else None

    @property
    def rest_in(self) -> float | None:
        """Seconds until it rests if no request comes; None: it does not rest by itself, or does not serve."""
        if self.place is not Place.READY or self.idle_timeout is None:
            return None
        return self.used_at + self.idle_timeout - time.monotonic()

    @property
    def is_missed(self) -> bool:
        """Returns whether requests at its services wait for it, or it is pinned and failed: it is to be made ready."""
        if self.problem and self.retry_at > time.time():
            return False
        if self.place is Place.ABSENT:
            return self.settings.is_pinned and bool(self.problem)
        return self.place is Place.ASLEEP and self.num_requests > 0 and not self.sleeps_until_woken

    @property
    def progress(self) -> str:
        """The progress of a start, in words."""
        if self.place is not Place.LOADING:
            return self.notice if self.preparing is None else "looks for its files"
        if self.is_woken:
            return "wakes"
        *others, last = self.processes.waits_for or [""]
        names = f"{', '.join(others)} and {last}" if others else last
        return f"waits for its {names}" if names else "starts"

    @property
    def occupant(self) -> Occupant:
        """The line as a plan sees it."""
        memory = self.settings.memory
        ready, asleep = self.sizes.ready, min(self.sizes.asleep, self.sizes.ready)
        if memory is not None:
            ready, asleep = memory, min(memory, asleep)
        return Occupant(
            self.name,
            self.place,
            ready,
            asleep,
            used_at=self.used_at,
            # Requests at a line that sleeps make no progress: nothing is gained by waiting for them.
            is_busy=self.place is Place.READY and self.num_requests > 0,
            can_move=not self.settings.is_pinned,
        )

    def fail(self, reason: str) -> None:
        """Takes in that it could not be made ready."""
        self.problem, self.retry_at = reason, time.time() + self._backoff
        self.num_failures += 1
        logger.error("%s: %s; next attempt after %g s at the earliest", self.name, reason, self._backoff)
        self._backoff = min(2 * self._backoff, MAX_BACKOFF_S)

    def begin(self) -> None:
        """Takes in that it starts or wakes."""
        self.is_woken = self.place is Place.ASLEEP
        self.place, self.problem, self.retry_at, self.notice = Place.LOADING, "", 0.0, ""
        self.sleeps_until_woken, self._num_seen = False, 0

    def succeed(self) -> None:
        """Takes in that it serves."""
        self.place, self.problem, self._backoff = Place.READY, "", FIRST_BACKOFF_S
        self.num_loads += 1
        self.used_at, self._num_seen = time.monotonic(), 0

    def rest(self, place: Place) -> None:
        """Takes in that it sleeps, or that its processes have ended."""
        self.place, self._num_seen = place, 0
        if place is Place.ABSENT:
            self.num_requests = 0

    def observe(self, load: Load) -> None:
        """Takes in what its tokenizer service says."""
        self.num_requests = load.num_requests
        used_at = time.monotonic() - load.idle_seconds
        if used_at > self.used_at + _USE_S:
            self.used_at = used_at
        differs = load.is_asleep != (self.place is Place.ASLEEP)
        self._num_seen = self._num_seen + 1 if differs else 0
        if self._num_seen < _SEEN:
            return
        if load.is_asleep:
            logger.info("%s: an operator put it to sleep", self.name)
            self.rest(Place.ASLEEP)
            self.sleeps_until_woken = True
        else:
            logger.info("%s: it was woken", self.name)
            self.begin()
            self.succeed()


def leaving(line: Line) -> str:
    """Returns what is said of a line that is being deleted."""
    return f"{line.name} is being deleted, which ends once its requests have ended"


async def until_idle(line: Line, interval: float) -> None:
    """Waits until no request runs at a line that could not be put to sleep. interval: seconds between looks."""
    while line.place is Place.READY:
        load = await line.processes.load()
        if load is None or not load.num_requests:
            return
        await asyncio.sleep(interval)


async def poll(lines: Iterable[Line]) -> bool:
    """Asks all lines in memory what they do; returns whether something that others see may differ."""

    async def ask(line: Line) -> None:
        load = await line.processes.load()
        if load is not None and line.place in _IN_MEMORY and not line.operation.locked():
            line.observe(load)

    here = [line for line in lines if line.place in _IN_MEMORY and not line.operation.locked()]
    before = [(line.place, line.used_at) for line in here]
    await asyncio.gather(*map(ask, here))
    return before != [(line.place, line.used_at) for line in here]

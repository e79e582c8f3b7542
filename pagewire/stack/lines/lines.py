"""The lines of a stack: which of them are in memory, and how they get there. It alone decides that.

A line that a request needs is *wanted*: in the order of these wishes, others make room, then it starts or wakes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from pagewire.errors import StartupError
from pagewire.flags.lines import LineSettings, StackModels, check_names
from pagewire.stack.lines.line import Line, LineError, Processes, leaving, poll, until_idle
from pagewire.stack.lines.plan import Place, Room, gib
from pagewire.stack.lines.sizes import KeptSizes, Sizes
from pagewire.stack.lines.sizing import Sizing
from pagewire.stack.lines.wanted import LOOK_S, Wanted
from pagewire.wire.model_names import not_served

logger = logging.getLogger(__name__)

POLL_S = 1.0
# Memory is shared among at most this many lines beside pinned ones: of many on demand, few are awake at the same time.
_SHARING = 4

MakeProcesses = Callable[[LineSettings, int], Processes]


class Lines:
    """All lines. All calls come from the event loop; run() does what they wish."""

    def __init__(
        self,
        models: StackModels,
        room: Room,
        make: MakeProcesses,
        kept: KeptSizes | None = None,
        *,
        on_failure: Callable[[StartupError], None] = lambda error: None,
    ) -> None:
        """make: the processes of a line; each line gets a number that no other has. on_failure: is called if a pinned
        line cannot start at first."""
        self.room = room
        self._make, self._on_failure = make, on_failure
        self._sizing = Sizing(kept or KeptSizes())
        self._count = 0
        self.lines: list[Line] = []
        self.default = models.default  # serves names that no line has, as long as it is there itself
        for settings in models.lines:
            self.lines.append(self._new(settings))
        self._wanted = Wanted(self, self._sizing)
        self._changed = asyncio.Event()
        self._tasks = set[asyncio.Task[None]]()
        self.has_started = False  # all pinned lines were ready once

    def _new(self, settings: LineSettings) -> Line:
        number, self._count = self._count, self._count + 1
        # What the files say is read once the services have started.
        return Line(settings, self._make(settings, number), Sizes(0, 0))

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def changed(self) -> asyncio.Event:
        """An event that is set at the next change; get it before you look."""
        return self._changed

    @property
    def names(self) -> list[str]:
        """All names that clients may give."""
        return [name for line in self.lines for name in line.settings.names]

    @property
    def share(self) -> float:
        """The part of the memory without a flag that each line gets."""
        at_once = min(len(self.lines), self.room.count or _SHARING, _SHARING)
        return 1 / max(1, sum(line.settings.is_pinned for line in self.lines), at_once)

    def find(self, name: str) -> Line:
        """Returns the line with a name. Raises LineError: what becomes of unknown names is the gateway's to decide."""
        found = next((line for line in self.lines if name in line.settings.names), None)
        if found is None:
            raise LineError("unknown", not_served(name, self.names))
        return found

    def tell(self) -> None:
        """Wakes the tasks that wait for a change."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -- wishes ------------------------------------------------------------------------------------------------------

    def request(self, name: str, idle_seconds: float | None = None) -> Line:
        """Has a line made ready. Raises LineError if its last attempt failed and the next one is not due."""
        line = self.find(name)
        if line.is_leaving:
            raise LineError("refused", leaving(line))
        if idle_seconds is not None:
            line.idle_override = idle_seconds
        line.used_at = time.monotonic()
        left = line.retry_at - time.time()
        if line.problem and left > 0:
            raise LineError("refused", f"{line.name}: {line.problem}", left)
        line.problem = ""  # the next attempt tells
        self._want(line)
        self.tell()
        return line

    async def rest(self, name: str, *, ends: bool) -> Line:
        """Takes a line out of memory once none of its requests runs, and returns when that is done."""
        line = self.find(name)
        self._unwant(line)
        if line.loading is not None:
            await asyncio.wait([line.loading])
        await self.put_away(line, ends=ends)
        return line

    async def put(self, settings: LineSettings) -> tuple[Line, bool]:
        """Adds a line; returns it, and whether it is new. Raises LineError."""
        present = next((line for line in self.lines if line.name == settings.name), None)
        for one in self.lines:
            if one.is_leaving and not set(one.settings.names).isdisjoint(settings.names):
                raise LineError("exists", f"{leaving(one)}; try again then")
        if present is not None and present.settings == settings:
            return present, False
        if present is not None:
            what = f"the model {settings.name!r:.100} is served with other settings"
            raise LineError("exists", f"{what}: delete it first")
        try:
            check_names(settings, {name: one.settings for one in self.lines for name in one.settings.names})
        except StartupError as error:
            raise LineError("exists", str(error)) from error
        line = self._new(settings)
        self.lines.append(line)
        await self._sizing.read(line)
        if settings.is_pinned:
            self._want(line)
        self.tell()
        return line, True

    async def delete(self, name: str) -> None:
        """Ends a line once its requests have ended, and forgets it. Raises LineError."""
        line = self.find(name)
        if name != line.name:
            raise LineError("refused", f"{name!r:.100} is another name of {line.name}: delete that")
        if all(one.is_leaving for one in self.lines if one is not line):
            raise LineError("refused", f"{line.name} is the only model: add another one first")
        line.is_leaving = True
        self._unwant(line)
        if line.loading is not None:
            line.loading.cancel()
            await asyncio.wait([line.loading])
        await self.put_away(line, ends=True)
        if line in self.lines:
            self.lines.remove(line)
        self.tell()

    def _want(self, line: Line) -> None:
        if line in self._wanted or line.preparing is not None or line.is_leaving:
            return
        if line.place is Place.ABSENT:
            line.preparing = self._later(self._prepare(line), f"prepare {line.name}")
        elif line.place is Place.ASLEEP:
            self._wanted.add(line)

    async def _prepare(self, line: Line) -> None:
        """Finds the files of a line, which may be a download; nothing else waits for it."""
        try:
            async with line.operation:
                if line.place is Place.ABSENT:
                    await line.processes.prepare()
            self._wanted.add(line)
        except StartupError as error:
            line.fail(str(error))
        finally:
            line.preparing = None
            self.tell()

    def _unwant(self, line: Line) -> None:
        """Takes a wish back. Gateways with requests for the line learn of it, and wish again."""
        if line.preparing is not None:
            line.preparing.cancel()
        elif line in self._wanted:
            self._wanted.drop(line)
        else:
            return
        line.num_withdrawals += 1
        self.tell()

    # -- work --------------------------------------------------------------------------------------------------------

    def begin(self, line: Line) -> None:
        """Starts or wakes a line for which there is room."""
        line.begin()
        line.loading = self._later(self._load(line), f"load {line.name}")
        self.tell()

    async def run(self) -> None:
        """Does what is wished, until it is cancelled."""
        work = [asyncio.create_task(self._wanted.run(), name="wanted lines")]
        work.append(asyncio.create_task(self._watch(), name="idle lines"))
        try:
            await asyncio.gather(self._read_all(), *work)
        finally:
            for task in [*work, *self._tasks]:
                task.cancel()
            await asyncio.wait([*work, *self._tasks])

    async def _read_all(self) -> None:
        for line in self.lines[:]:
            await self._sizing.read(line)
        self.tell()

    def _later(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _load(self, line: Line) -> None:
        """Starts or wakes a line that has room."""
        began = time.monotonic()
        try:
            async with line.operation:
                await (line.processes.wake() if line.is_woken else line.processes.start())
                line.succeed()
                self.tell()  # measuring takes a moment, which no request should wait for
                line.model = await line.processes.model() or line.model
                await self._sizing.measure(line)
        except StartupError as error:
            await self._on_failed_load(line, error)
        else:
            how = "woken" if line.is_woken else "loaded"
            logger.info("%s is %s after %.1f s, %s", line.name, how, time.monotonic() - began, gib(line.sizes.ready))
        finally:
            if line.place is Place.LOADING:  # it was cancelled
                line.rest(Place.ASLEEP if line.is_woken else Place.ABSENT)
            line.loading = None
            self.tell()

    async def _on_failed_load(self, line: Line, error: StartupError) -> None:
        is_first = line.settings.is_pinned and not line.num_loads and not self.has_started
        if is_first:
            cause = error.__cause__
            self._on_failure(cause if isinstance(cause, StartupError) else error)
        # A start from the files shows what is wrong with them, if a wake does not.
        await line.processes.end()
        line.rest(Place.ABSENT)
        line.fail(str(error))

    async def put_away(self, line: Line, *, ends: bool) -> None:
        """Puts a line to sleep once its running requests have ended; with `ends`, ends its processes then."""
        async with line.operation:
            if line.place is Place.READY:
                try:
                    await line.processes.sleep()
                except StartupError as error:
                    logger.warning("%s does not fall asleep, and ends: %s", line.name, error)
                    ends = True
                else:
                    line.rest(Place.ASLEEP)
                    self.tell()
                    await self._sizing.measure(line)
            if ends and line.place is not Place.LOADING:
                await until_idle(line, LOOK_S)
                await line.processes.end()
                line.rest(Place.ABSENT)
            self.tell()

    # -- observation -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Looks at lines in memory from time to time: requests that wait, and lines that are idle."""
        while True:
            await asyncio.sleep(POLL_S)
            if await poll(self.lines):
                self.tell()
            for line in self.lines[:]:
                if line.operation.locked():
                    continue
                if line.is_missed:
                    self._want(line)
                elif (left := line.rest_in) is not None and left <= 0 and not line.num_requests:
                    logger.info("%s: no request for %g s; it falls asleep", line.name, line.idle_timeout)
                    self._later(self.put_away(line, ends=False), f"rest {line.name}")
                elif line.num_requests and self._sizing.is_due(line):
                    await self._sizing.measure(line)

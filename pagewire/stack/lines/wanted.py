"""The queue of lines that requests need: others make room for the first one, then it starts or wakes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from pagewire.stack.lines.line import Line, poll
from pagewire.stack.lines.plan import Occupant, Place, Room, overtakes, plan
from pagewire.stack.lines.sizing import Sizing

logger = logging.getLogger(__name__)

LOOK_S = 0.2  # between looks at lines with requests that have to end first
PATIENCE_S = 5.0  # of a wanted line; then requests that arrive for others wait until these have slept

_AT_REST = (Place.ABSENT, Place.ASLEEP)


class Works(Protocol):
    """Is what a queue needs of `Lines`."""

    lines: list[Line]
    room: Room

    @property
    def changed(self) -> asyncio.Event: ...
    def tell(self) -> None: ...
    def begin(self, line: Line) -> None: ...
    async def put_away(self, line: Line, *, ends: bool) -> None: ...


class Wanted:
    """Lines that wait until there is room. The first one is served first; a later one overtakes it if there is room for
    that one now, and the first one waits no longer for it."""

    def __init__(self, works: Works, sizing: Sizing) -> None:
        self._works, self._sizing = works, sizing
        self._queue: list[Line] = []
        self._wake = asyncio.Event()

    def __contains__(self, line: Line) -> bool:
        return line in self._queue

    def add(self, line: Line) -> None:
        if line not in self._queue:
            self._queue.append(line)
            self._wake.set()

    def drop(self, line: Line) -> None:
        if line in self._queue:
            self._queue.remove(line)

    async def run(self) -> None:
        """Serves the lines, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                line = self._queue[0]
                try:
                    await self._make_ready(line)
                except Exception as error:  # a defect in one line must not stop the others
                    logger.exception("%s cannot be made ready", line.name)
                    line.fail(str(error))
                self.drop(line)
                line.notice = ""
                self._works.tell()

    async def _make_ready(self, line: Line) -> None:
        """Has others make room for a line, and begins to load it."""
        if not line.sizes.ready:
            await self._sizing.read(line)
        since = time.monotonic()
        while True:
            await poll(self._works.lines)
            if line not in self._queue or line.place in (Place.READY, Place.LOADING):
                return
            if line.operation.locked():  # it still falls asleep or ends: it loads from where it is then
                async with line.operation:
                    continue
            drains = time.monotonic() - since > PATIENCE_S
            found = plan(self._occupants(), self._works.room, line.name, drains=drains)
            if found.refusal:
                line.fail(found.refusal)
                return
            if not found.steps and not found.waits_for:
                self._works.begin(line)
                return
            notice = f"waits for {', '.join(found.waits_for)}" if found.waits_for else ""
            if notice != line.notice:
                line.notice = notice
                self._works.tell()
            for step in found.steps:
                other = next(one for one in self._works.lines if one.name == step.name)
                logger.info("%s %s to make room for %s", step.name, "ends" if step.ends else "falls asleep", line.name)
                await self._put_away(other, ends=step.ends)
            if found.waits_for:
                await self._let_others_pass()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._works.changed.wait(), LOOK_S)

    async def _put_away(self, line: Line, *, ends: bool) -> None:
        """Has a line make room. Its requests may run for long, while others overtake."""
        leaving = asyncio.create_task(self._works.put_away(line, ends=ends), name=f"put {line.name} away")
        try:
            while not (await asyncio.wait({leaving}, timeout=LOOK_S))[0]:
                await self._let_others_pass()
            leaving.result()
        finally:
            leaving.cancel()
            await asyncio.wait({leaving})

    async def _let_others_pass(self) -> None:
        """Begins to load later lines that do not make the first one wait longer."""
        for line in self._queue[1:]:
            if not line.sizes.ready:
                await self._sizing.read(line)
            may_begin = line in self._queue[1:] and line.place in _AT_REST and not line.operation.locked()
            if may_begin and overtakes(self._occupants(), self._works.room, self._queue[0].name, line.name):
                self._works.begin(line)
                self.drop(line)

    def _occupants(self) -> Sequence[Occupant]:
        return [one.occupant for one in self._works.lines]

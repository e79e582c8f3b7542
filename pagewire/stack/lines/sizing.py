"""The memory of each line: first what its files say, then what was measured while it ran."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from pagewire.stack.lines.described import described
from pagewire.stack.lines.line import Line
from pagewire.stack.lines.plan import Place
from pagewire.stack.lines.sizes import KeptSizes, estimated, facts, weights_size

_PAUSE_S = 10.0  # between measurements of a line that is used


class Sizing:
    """Reads and measures lines, and keeps what it measured."""

    def __init__(self, kept: KeptSizes) -> None:
        self._kept = kept
        self._measured_at: dict[str, float] = {}  # by name

    async def read(self, line: Line) -> None:
        """Reads what files say of a line: the model, and how much memory it will take."""

        def read() -> None:
            config = line.settings.config
            found = facts(config)
            line.size = weights_size(config, found)
            if line.model is None:
                line.model = described(config, line.name, found, line.size)
            if not line.sizes.is_measured:
                line.sizes = self._kept.of(config) or estimated(config)

        await asyncio.to_thread(read)

    def is_due(self, line: Line) -> bool:
        """Returns whether the last measurement was long ago."""
        return time.monotonic() - self._measured_at.get(line.name, 0.0) > _PAUSE_S

    async def measure(self, line: Line) -> None:
        """Measures the memory of a line where it is now, and keeps the most that was seen for later plans."""
        self._measured_at[line.name] = time.monotonic()
        place, size, known = line.place, await line.processes.memory(), line.sizes
        if not size or line.place is not place:
            return
        if place is Place.READY:
            most = max(size, known.ready) if known.is_measured else size
            sizes = replace(known, ready=most, is_measured=True)
        elif place is Place.ASLEEP:
            sizes = replace(known, asleep=size)
        else:
            return
        if sizes != known:
            line.sizes = sizes
            await asyncio.to_thread(self._kept.keep, line.settings.config, sizes)

"""A model of a running stack, which is loaded when a command needs it."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pagewire.stack.address import stack_at
from pagewire.stack.running import RunningStack
from pagewire.tools.served.stack_lines import READY, StackLines, has_name

CLEAR = "\r\x1b[K"
_TICK_S = 1.0


@dataclass(frozen=True)
class Served:
    """A model of a running stack. line: its name there; "": the stack has one model, which always serves."""

    stack: RunningStack
    line: str = ""

    async def ready(self) -> str:
        """Loads or wakes the model, with progress on a terminal, and returns an address for clients. Raises
        StartupError."""
        if not self.line:
            return self.stack.reachable
        async with StackLines(self.stack) as lines, _progress() as show:
            return str((await lines.loaded(self.line, show)).tokenizer_address)


@asynccontextmanager
async def _progress() -> AsyncIterator[Callable[[str], None] | None]:
    """Yields the function that shows what happens, with the seconds since the beginning; None: there is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    started, shown = time.monotonic(), ""

    def paint() -> None:
        print(f"{CLEAR}{shown} ({time.monotonic() - started:.0f} s) ...", end="", file=sys.stderr, flush=True)

    def show(text: str) -> None:
        nonlocal shown
        shown = text
        paint()

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if shown:
                paint()

    ticking = asyncio.create_task(tick())
    try:
        yield show
    finally:
        ticking.cancel()
        print(CLEAR, end="", file=sys.stderr, flush=True)


async def served_at(address: str, model: str) -> Served | None:
    """Returns a model of the stack on this machine with this address. Raises StartupError.

    None: the address itself serves the request, as for other stacks, for names that only an adapter may have, and
    without a name while the first model is ready.
    """
    stack = stack_at(address)
    if stack is None or not stack.lines:
        return None
    async with StackLines(stack) as lines:
        listed = await lines.listed()
    fits = (line for line in listed if has_name(line, model)) if model else iter(listed[:1])
    line = next(fits, None)
    return None if line is None or (not model and line.state == READY) else Served(stack, line.name)

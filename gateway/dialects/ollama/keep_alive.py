"""Ollama's `keep_alive`: when a model leaves memory. It is a wish to the stack; without one, it has no effect."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from pagewire.gateway.dialects.ollama.options import idle_seconds
from pagewire.gateway.models.line import ModelLine
from pagewire.gateway.models.models import Models

# The most seconds that the answer to a request for unloading waits for it: other requests may run.
UNLOAD_S = 5.0


def kept_alive(models: Models, line: ModelLine, keep_alive: float | str | None) -> Callable[[], Awaitable[None]] | None:
    """Tells the stack when a line may rest. Returns what has to be called after the answer, if anything."""
    stack, seconds = models.stack, idle_seconds(keep_alive)
    if stack is None or seconds is None:
        return None
    if seconds:
        stack.keep(line, seconds)
        return None

    async def rest() -> None:
        stack.rest(line)

    return rest


async def load_or_unload(models: Models, line: ModelLine, keep_alive: float | str | None) -> None:
    """Returns once a line is loaded or, if that is the wish, is put away. Raises ApiError."""
    if models.stack is None or idle_seconds(keep_alive) != 0:
        kept_alive(models, line, keep_alive)
        await line.reach(computes=True)
    elif line.state in ("ready", "loading"):
        models.stack.rest(line)
        with suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_S):
                while line.state in ("ready", "loading"):
                    await line.changed.wait()

"""Ollama's `keep_alive`: when a model leaves memory. It is a wish to the stack; without one, it has no effect."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.dialects.ollama.models import LATEST
from pagewire.gateway.dialects.ollama.options import idle_seconds
from pagewire.gateway.models.line import ModelLine
from pagewire.gateway.models.models import Models
from pagewire.gateway.operation.admin.route import WRONG_KEY
from pagewire.wire.keys import caller
from pagewire.wire.model_names import not_served

# The most seconds that the answer to a request for unloading waits for it: other requests may run.
UNLOAD_S = 5.0


class Wish(Protocol):
    """A request, as far as it is about memory."""

    model: str
    keep_alive: float | str | None


def kept_alive(models: Models, line: ModelLine, body: Wish) -> Callable[[], Awaitable[None]] | None:
    """Tells the stack when a line may rest. Returns what has to be called after the answer, if anything."""
    stack, seconds = models.stack, idle_seconds(body.keep_alive)
    # Names that no model has say nothing about the model that serves them, which others use by its own name. Nor does
    # one tenant decide for the others how long a model stays.
    if stack is None or seconds is None or not _is_meant(line, body.model) or not _may_decide():
        return None
    if seconds:
        stack.keep(line, seconds)
        return None

    async def rest() -> None:
        stack.rest(line)

    return rest


async def load_or_unload(models: Models, line: ModelLine, body: Wish) -> None:
    """Returns once a line is loaded or, if that is the wish, is put away. Raises ApiError."""
    if models.stack is None or idle_seconds(body.keep_alive) != 0:
        kept_alive(models, line, body)
        await line.reach(computes=True)
    elif not _is_meant(line, body.model):
        raise ApiError(404, not_served(body.model, await models.names()), param="model", code="model_not_found")
    elif not _may_decide():
        raise ApiError(403, WRONG_KEY, code="not_permitted")
    elif line.state in ("ready", "loading"):
        models.stack.rest(line)
        with suppress(TimeoutError):
            async with asyncio.timeout(UNLOAD_S):
                while line.state in ("ready", "loading"):
                    await line.changed.wait()


def _is_meant(line: ModelLine, name: str) -> bool:
    return not line.takes_all or not {name, name.removesuffix(LATEST)}.isdisjoint(line.names)


def _may_decide() -> bool:
    """Returns whether a model may leave memory by the wish of this client; without keys, all clients are one user."""
    key = caller.get()
    return key is None or key.admin

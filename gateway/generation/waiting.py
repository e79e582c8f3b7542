"""Streams whose model is not loaded yet: comments keep their connections, which proxies close after silence."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from pagewire.gateway.core.outputs import ChoiceOutputs

# Seconds between two comments, and before the first one: until then, an error has its own status.
COMMENT_S = 5.0


async def first_outputs(
    outputs: Awaitable[ChoiceOutputs], waits: Callable[[], str], comment: Callable[[bytes], Awaitable[None]]
) -> ChoiceOutputs:
    """Returns the first outputs of a stream; until then, writes a comment from time to time while it waits.

    waits: returns what it waits for; "" = for nothing. comment: sends one, after the head.
    """
    first = asyncio.ensure_future(outputs)
    try:
        while not (await asyncio.wait({first}, timeout=COMMENT_S))[0]:
            if reason := waits():
                await comment(comment_of(reason))
        return first.result()
    finally:
        first.cancel()


async def with_comments(pieces: AsyncIterator[bytes], waits: Callable[[], str]) -> AsyncIterator[bytes]:
    """Yields the pieces of a stream, with comments like those of first_outputs() where it waits."""
    following = asyncio.ensure_future(anext(pieces, None))
    try:
        while True:
            if not (await asyncio.wait({following}, timeout=COMMENT_S))[0]:
                if reason := waits():
                    yield comment_of(reason)
                continue
            if (piece := following.result()) is None:
                return
            yield piece
            following = asyncio.ensure_future(anext(pieces, None))
    finally:
        following.cancel()


def comment_of(reason: str) -> bytes:
    """Returns a comment of a stream of server-sent events, which clients ignore."""
    return f": {reason}\n\n".encode()

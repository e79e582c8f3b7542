"""Streams of models that are not loaded yet: comments keep connections that proxies would close after silence."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Send

from pagewire.gateway.core.encoding import EVENT_STREAM_HEADERS
from pagewire.gateway.core.outputs import ChoiceOutputs
from pagewire.gateway.core.request_context import RequestContext

# Seconds between two comments, and before the first one: until then, an error has its own status.
COMMENT_S = 5.0


async def first_outputs(
    outputs: Awaitable[ChoiceOutputs], waits: Callable[[], str], context: RequestContext, send: Send
) -> ChoiceOutputs:
    """Returns the first outputs of a stream of events; until then, sends a comment from time to time while it waits.

    waits: returns what it waits for; "" = for nothing. send: for the head.
    """
    first = asyncio.ensure_future(outputs)
    try:
        while not (await asyncio.wait({first}, timeout=COMMENT_S))[0]:
            if reason := waits():
                if not context.status:
                    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
                await context.send({"type": "http.response.body", "body": comment_of(reason), "more_body": True})
        return first.result()
    finally:
        first.cancel()


def comment_of(reason: str) -> bytes:
    """Returns a comment of a stream of events, which clients ignore."""
    return f": {reason}\n\n".encode()

"""Waiting within a request: no longer than its deadline, and only while its client is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.request_context import receiving, time_left


async def unless_gone(awaited: Coroutine[Any, Any, object], what: str) -> None:
    """Waits until something has happened. what: for errors, such as "loading NAME".

    Raises ApiError 504 at the deadline of the present request, ClientDisconnect once its client has gone.
    """
    happened = asyncio.ensure_future(awaited)
    receive = receiving.get()
    gone = None if receive is None else asyncio.ensure_future(_gone(receive))
    try:
        done, _ = await asyncio.wait(
            {happened} if gone is None else {happened, gone}, timeout=time_left(), return_when=asyncio.FIRST_COMPLETED
        )
        if gone in done:
            raise ClientDisconnect
        if not done:
            raise ApiError(504, f"the request timed out: {what} took too long")
    finally:
        for task in (happened, gone):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(task for task in (happened, gone) if task is not None), return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

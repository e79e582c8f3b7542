"""A window of requests in flight, with answers in order."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import grpc

from pagewire.tools.llm.outputs import PromptError
from pagewire.tools.llm.progress import Counter
from pagewire.wire.rpc import RpcError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_BUSY_S = 0.5  # between attempts at a full server
_GONE_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each new attempt at an unreachable server; a stack restarts dead services


async def ask_all(
    items: Iterable[Item], ask: Callable[[Item], Awaitable[Answer]], window: int, progress: Counter
) -> list[Answer | PromptError]:
    """Returns results in the order of the items. Takes items from the iterable only when there is room for them."""
    answers: dict[int, Answer | PromptError] = {}
    running: set[asyncio.Task[None]] = set()

    async def one(index: int, item: Item) -> None:
        try:
            answers[index] = await _persistent(lambda: ask(item))
        except RpcError as error:
            answers[index] = PromptError(index, error.code.name, error.message, item)
        except (TypeError, ValueError, OSError) as error:
            answers[index] = PromptError(index, "INVALID_ARGUMENT", str(error), item)
        progress.advance()

    try:
        for index, item in enumerate(items):
            if len(running) >= window:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            running.add(asyncio.create_task(one(index, item)))
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    return [answers[index] for index in range(len(answers))]


async def _persistent(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Returns the answer, with retries if needed: the caller has received nothing from a failed request."""
    tries = iter(_GONE_S)
    while True:
        try:
            return await ask()
        except RpcError as error:
            if error.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
                delay: float | None = max(_BUSY_S, error.retry_delay or 0.0)
            else:
                delay = next(tries, None) if error.code == grpc.StatusCode.UNAVAILABLE else None
            if delay is None:
                raise
        await asyncio.sleep(delay)

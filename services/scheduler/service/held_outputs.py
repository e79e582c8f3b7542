"""Outputs on their way to the clients: those of two short steps go together.

A message costs the services on its way the same with the tokens of one step as with those of two.
"""

import asyncio
import time
from collections.abc import Callable, Iterator

from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.values.request import Request

# Seconds between two results of short steps: no reader notices whether a token comes with the next one.
SHORT_STEP_S = 0.005
# Seconds for which a token waits at most, if the next result is late.
MAX_HOLD_S = 0.008


class HeldOutputs:
    """The outputs that are not delivered yet: those of a short step until the next result, unless they are the first or
    the last ones of a request or contain more than tokens."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        """deliver: is called when the outputs are due, if they were not taken before."""
        self._deliver = deliver
        self._held: Outputs | None = None
        self._due: asyncio.Handle | None = None
        self._is_due_now = False
        self._last_time = 0.0  # of a result

    def deliver_due(self) -> None:
        """Delivers the outputs if they do not wait for a result. Call it before a result is taken in."""
        if self._is_due_now:
            self._deliver()

    def add(self, outputs: Outputs) -> None:
        """Adds the outputs of a result. They are delivered after the tasks that are ready to run, or later."""
        now = time.monotonic()
        seconds, self._last_time = now - self._last_time, now
        self._is_due_now = self._held is not None or seconds >= SHORT_STEP_S or not _can_wait(outputs)
        if self._due is not None:
            self._due.cancel()
        self._held = outputs if self._held is None else joined(self._held, outputs)
        loop = asyncio.get_running_loop()
        self._due = loop.call_soon(self._deliver) if self._is_due_now else loop.call_later(MAX_HOLD_S, self._deliver)

    def take(self) -> Outputs | None:
        """Returns the outputs, which are then no longer held; None if there are none."""
        if self._due is not None:
            self._due.cancel()
        self._due, self._is_due_now = None, False
        held, self._held = self._held, None
        return held


def _can_wait(outputs: Outputs) -> bool:
    """Returns whether all of them are tokens in the middle of outputs, without log probabilities."""
    if outputs.ends or outputs.refused or outputs.logprobs or outputs.prompt_logprobs or outputs.vectors:
        return False
    return all(
        request.num_output_tokens > num_tokens
        for request, num_tokens in zip(outputs.requests, outputs.num_tokens, strict=True)
    )


def joined(earlier: Outputs, later: Outputs) -> Outputs:
    """Adds outputs that could wait to those of the next result, which it returns. A request that this result ends with
    an error loses its tokens, as all that would follow."""
    held = dict(_rows(earlier))
    num_tokens, token_ids = [], []
    for request, ids in _rows(later):
        whole = held.pop(request, []) + ids
        num_tokens.append(len(whole))
        token_ids += whole
    for request, _ in later.refused:
        held.pop(request, None)
    for ids in held.values():
        num_tokens.append(len(ids))
        token_ids += ids
    later.requests += held
    later.num_tokens, later.token_ids = num_tokens, token_ids
    return later


def _rows(outputs: Outputs) -> Iterator[tuple[Request, list[int]]]:
    start = 0
    for request, num_tokens in zip(outputs.requests, outputs.num_tokens, strict=True):
        yield request, outputs.token_ids[start : start + num_tokens]
        start += num_tokens

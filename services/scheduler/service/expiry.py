"""Deadlines on the event loop: a request ends when its deadline passes, at the latest before the next step."""

import asyncio
import time
from collections.abc import Callable

import grpc

from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.service.deadlines import Deadlines
from pagewire.services.scheduler.service.live_request import LiveRequest
from pagewire.wire.rpc import RpcError


class Expiry:
    """Reports requests past their deadline, by request id."""

    def __init__(self, on_due: Callable[[int], None]) -> None:
        """on_due: called with the id of a request past its deadline."""
        self._on_due = on_due
        self._deadlines = Deadlines()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request_id: int, timeout: float) -> None:
        """Sets the deadline of a request. timeout: seconds from now."""
        deadline = time.monotonic() + timeout
        is_first = self._deadlines.next is None or deadline < self._deadlines.next
        self._deadlines.add(request_id, deadline)
        if is_first:
            self._set_timer()

    def remove(self, request_id: int) -> None:
        """Removes a deadline; does nothing if the request has none."""
        self._deadlines.remove(request_id)

    def check(self) -> None:
        """Reports the requests past their deadlines."""
        if self._deadlines.next is None or self._deadlines.next > time.monotonic():
            return
        for request_id in self._deadlines.take_due(time.monotonic()):
            self._on_due(request_id)
        self._set_timer()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        self.stop()
        if self._deadlines.next is not None:
            # Timers may be a millisecond early.
            seconds = max(0.0, self._deadlines.next - time.monotonic()) + 0.001
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.check()
        if self._timer is None:
            self._set_timer()


def expired(live: LiveRequest) -> RpcError:
    """Returns the error of a request past its deadline, and counts it."""
    stats.EXPIRED.labels(live.stage).inc()
    what = {
        "waiting": "it waited for its first step",
        "prompt": "its prompt was computed",
        "output": f"its output was generated: {live.request.num_output_tokens} tokens so far",
    }[live.stage]
    message = f"the request's deadline passed while {what}; set a longer timeout, or try again when the load is lower"
    return RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, message)

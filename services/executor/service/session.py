"""A scheduler's stream of steps, as the worker sees it, and its possible ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from pagewire.services.executor.device.clock import Clock
from pagewire.services.executor.service.failure_watch import FailureWatch
from pagewire.v1 import executor_pb2

# Called on the worker's threads with each result in step order, then once with the end of the session: an error, or
# None if it was closed.
Deliver = Callable[[executor_pb2.StepResult | Exception | None], None]


class StepFailed(RuntimeError):
    """A step failed, possibly because of a request in it. The executor continues with empty rows."""

    code = grpc.StatusCode.UNKNOWN


@dataclass(eq=False)
class Session:
    """One Execute stream. Opening one ends the previous one and empties all rows."""

    deliver: Deliver
    last_step_id: int = 0
    last_clock: Clock | None = None  # of the last step that was returned
    failures: FailureWatch = field(default_factory=FailureWatch)
    is_over: bool = False  # only its end is still delivered

"""A scheduler's stream of steps, as the worker sees it, and how it may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from pagewire.services.executor.device.clock import Clock
from pagewire.services.executor.service.failure_watch import FailureWatch
from pagewire.v1 import executor_pb2

# Called on the worker's threads with each result in step order, then once with how the session ended: an error, or
# None when it was closed.
Deliver = Callable[[executor_pb2.StepResult | Exception | None], None]


class StepFailed(RuntimeError):
    """A step failed, maybe because of a request in it. The executor goes on, with empty rows."""

    code = grpc.StatusCode.UNKNOWN


@dataclass(eq=False)
class Session:
    """One Execute stream. Opening one ends the one before and empties all rows."""

    deliver: Deliver
    last_step_id: int = 0
    last_clock: Clock | None = None  # of the last step that was returned
    failures: FailureWatch = field(default_factory=FailureWatch)
    is_over: bool = False  # only its end is delivered from now on

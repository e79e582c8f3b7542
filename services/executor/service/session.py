"""A scheduler's stream of steps, as the worker sees it, and how it may end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from pagewire.services.executor.device.clock import Clock
from pagewire.services.executor.start.probe import Doubts
from pagewire.v1 import executor_pb2

# Called on the worker's threads with each result in step order, then once with how the session ended: an error, or
# None when it was closed.
Deliver = Callable[[executor_pb2.StepResult | Exception | None], None]


class DeviceError(RuntimeError):
    """The executor cannot go on: the device is in an unknown state, hangs, or the model is damaged."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> None:
        """code: that the stream ends with."""
        super().__init__(message)
        self.code = code


class StepFailed(RuntimeError):
    """A step failed, maybe because of a request in it. The executor goes on, with empty rows."""

    code = grpc.StatusCode.UNKNOWN


@dataclass(eq=False)
class Session:
    """One Execute stream. Opening one ends the one before and empties all rows."""

    deliver: Deliver
    last_step_id: int = 0
    last_clock: Clock | None = None  # of the last step that was returned
    doubts: Doubts = field(default_factory=Doubts)
    is_over: bool = False  # nothing more is delivered but its end

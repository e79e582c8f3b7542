"""How an executor was lost, by what its stream ended with, and what that says of the requests that it ran."""

import enum


class Loss(enum.StrEnum):
    """As metrics name it."""

    STEP = "step"  # a step failed; the executor goes on, with empty rows
    DEVICE = "device"  # it has said that its device failed
    HANG = "hang"  # it has said that a step does not end
    EXIT = "exit"  # its process ended by its own doing, as its successor tells
    SILENT = "silent"  # the stream broke: it died of a step, or somebody killed it
    DELIBERATE = "deliberate"  # it has other weights now, or another scheduler
    MODEL = "model"  # its model yields no numbers, whoever asks

    @property
    def may_be_a_requests_fault(self) -> bool:
        return self not in (Loss.DELIBERATE, Loss.MODEL)

    @property
    def is_of_step(self) -> bool:
        """Whether a step was the occasion for certain."""
        return self in (Loss.STEP, Loss.DEVICE, Loss.HANG)


# What the scheduler itself says when it has an executor go over to other weights.
GOES_OVER = "it gets other weights"
# What the scheduler itself says when it lets go of one that has left the list.
LEFT = "it has left the list"
# What the executor says (`executor.proto`). gRPC itself uses the codes, too, with words of its own.
_BY_BEGINNING = {
    "UNKNOWN: a step failed": Loss.STEP,
    "INTERNAL: fatal device error": Loss.DEVICE,
    "DEADLINE_EXCEEDED: no progress": Loss.HANG,
    "ABORTED: the executor": Loss.DELIBERATE,
    "stream ended": Loss.DELIBERATE,  # without an error
    GOES_OVER: Loss.DELIBERATE,
    LEFT: Loss.DELIBERATE,
    "DATA_LOSS: the model": Loss.MODEL,
}


def loss_of(reason: str) -> Loss:
    """reason: as `Link` tells it, "CODE: message" if the executor has ended the stream."""
    return next((loss for beginning, loss in _BY_BEGINNING.items() if reason.startswith(beginning)), Loss.SILENT)

"""The ways in which executors are lost, and what each says of the requests that ran there."""

import enum


class Loss(enum.StrEnum):
    """The values that can end a request are labels of metrics."""

    STEP = "step"  # a step failed; the executor goes on, with empty rows
    DEVICE = "device"  # it reported that its device failed
    HANG = "hang"  # it reported that a step does not end
    EXIT = "exit"  # its process ended by its own doing, as its successor reports
    SILENT = "silent"  # the stream broke: it died of a step, or was killed
    MODEL = "model"  # its model yields no numbers, whatever the prompt
    LEFT_TO_OTHERS = "left to others"  # it closed the stream, or another scheduler has it
    WEIGHTS = "weights"  # it gets other weights
    UNLISTED = "unlisted"  # it has left the list

    @property
    def may_be_a_requests_fault(self) -> bool:
        return self in (Loss.STEP, Loss.DEVICE, Loss.HANG, Loss.EXIT, Loss.SILENT)

    @property
    def is_of_step(self) -> bool:
        """True if a step was the occasion for certain."""
        return self in (Loss.STEP, Loss.DEVICE, Loss.HANG)

    @property
    def is_wanted(self) -> bool:
        """True if this scheduler let go of the executor."""
        return self in (Loss.WEIGHTS, Loss.UNLISTED)

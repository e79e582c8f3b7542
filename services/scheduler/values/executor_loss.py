"""The ways in which executors are lost, and whether a request may be the cause of each."""

import enum


class Loss(enum.StrEnum):
    """The cause of a loss. The values that can end a request are labels of metrics."""

    STEP = "step"  # a step failed; the executor continues with empty rows
    DEVICE = "device"  # it reported that its device failed
    HANG = "hang"  # it reported that a step does not end
    EXIT = "exit"  # its process failed, as its successor reports
    SILENT = "silent"  # the stream broke: a step crashed the process, or it was killed
    MODEL = "model"  # its model computes NaN for any prompt
    LEFT_TO_OTHERS = "left to others"  # it closed the stream, or another scheduler took it over
    WEIGHTS = "weights"  # it gets other weights, or falls asleep
    UNLISTED = "unlisted"  # it has left the list

    @property
    def may_be_caused_by_request(self) -> bool:
        return self in (Loss.STEP, Loss.DEVICE, Loss.HANG, Loss.EXIT, Loss.SILENT)

    @property
    def is_of_step(self) -> bool:
        """True if a step was certainly the cause."""
        return self in (Loss.STEP, Loss.DEVICE, Loss.HANG)

    @property
    def is_wanted(self) -> bool:
        """True if this scheduler itself ended the stream."""
        return self in (Loss.WEIGHTS, Loss.UNLISTED)

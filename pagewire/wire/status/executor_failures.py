"""The causes for which an executor ends its stream of steps: the reasons in the ErrorInfo of its status."""

import enum


class ExecutorFailure(enum.StrEnum):
    """The names are part of the contract between the scheduler and its executors (`executor.proto`)."""

    STEP_FAILED = "STEP_FAILED"  # the executor continues, and accepts a new stream
    DEVICE_FAILED = "DEVICE_FAILED"  # the executor ends
    NO_PROGRESS = "NO_PROGRESS"  # a step does not end; the executor does
    MODEL_BROKEN = "MODEL_BROKEN"  # the model computes NaN for any prompt; the executor ends
    SUPERSEDED = "SUPERSEDED"  # a new stream has taken over the executor

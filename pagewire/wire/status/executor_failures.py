"""The causes for which an executor ends its stream of steps: the reasons in the ErrorInfo of its status."""

import enum


class ExecutorFailure(enum.StrEnum):
    """The names are part of the contract between the scheduler and its executors (`executor.proto`)."""

    STEP_FAILED = "STEP_FAILED"  # the executor goes on, and takes a new stream
    DEVICE_FAILED = "DEVICE_FAILED"  # it ends
    NO_PROGRESS = "NO_PROGRESS"  # a step does not end; the executor does
    MODEL_BROKEN = "MODEL_BROKEN"  # the model yields no numbers, whatever the prompt; it ends
    SUPERSEDED = "SUPERSEDED"  # a new stream has the executor

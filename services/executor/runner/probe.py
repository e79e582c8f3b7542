"""A fixed prompt that checks whether the device and the model work, at start and after a failed step."""

from __future__ import annotations

from dataclasses import replace

import grpc
import numpy as np

from pagewire.config.sampling_params import with_defaults
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.step.dummy_step import dummy_step
from pagewire.v1.common_pb2 import SamplingParams

_NUM_TOKENS = 16
_GREEDY = with_defaults(SamplingParams(temperature=0))


class BrokenModel(DeviceError):
    """The model yields NaN for any prompt: its weights are damaged or do not fit its dtype."""

    def __init__(self, message: str) -> None:
        super().__init__(message, grpc.StatusCode.DATA_LOSS)


def probe(runner: Runner, vocab_size: int) -> None:
    """Runs a fixed prompt through the device's whole part of a step. Empties the rows; writes to block 0.

    Raises:
        BrokenModel: the result is NaN.
        Exception: any error of a broken device.
    """
    step = dummy_step(
        runner.limits,
        len(runner.kv_groups),
        1,
        _NUM_TOKENS,
        context_len=0,
        sampling=_GREEDY,
        num_draft_tokens=0,
        yields_vectors=not runner.pooling.generates,
    )
    (request,) = step.new_requests
    token_ids = np.linspace(0, vocab_size - 1, len(request.token_ids)).astype(np.int32)
    runner.reset()
    output = runner.execute(replace(step, new_requests=[replace(request, token_ids=token_ids)]))
    failures = output.wait().failures
    runner.reset()
    if failures:
        raise BrokenModel(
            "the model yields no numbers (NaN) for a fixed prompt either: its weights are damaged, or too large for "
            "--dtype; check the files of the model, or try --dtype float32"
        )

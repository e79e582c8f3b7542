"""Whether a model that yields no numbers (NaN) does so for certain requests, or for everybody.

The first ends these requests. The second is nobody's fault but that of weights that are damaged, or of a dtype that
they do not fit into: a fixed prompt tells, at start, and whenever there is doubt.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pagewire.config.sampling_params import with_defaults
from pagewire.services.executor import stats
from pagewire.services.executor.runner.runner import Runner
from pagewire.services.executor.step.dummy_step import dummy_step
from pagewire.services.executor.step.failures import Cause, Failure
from pagewire.v1.common_pb2 import SamplingParams

logger = logging.getLogger(__name__)

_NUM_TOKENS = 16
_GREEDY = with_defaults(SamplingParams(temperature=0))
# Requests one after the other, each alone in its step, that got NaN: somebody may send such ones on purpose.
_MOST_ALONE = 3
_NUM_KNOWN = 1024  # a request may fail again in the step after, before the scheduler has ended it


class NoNumbers(RuntimeError):
    """All that a step has yielded is NaN."""


class BrokenModel(RuntimeError):
    """The model yields no numbers, whatever it is asked."""


def probe(runner: Runner, vocab_size: int) -> None:
    """Runs a fixed prompt through all of the device's part of a step. Empties the rows; writes to block 0.

    Raises:
        BrokenModel: what came of it are no numbers.
        Exception: whatever a broken device raises.
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


class Doubts:
    """Of one stream: looks at what fails in each step. Where it is everybody, the model is to be probed."""

    def __init__(self) -> None:
        self._num_alone = 0
        self._known: deque[int] = deque(maxlen=_NUM_KNOWN)  # requests that have failed

    def arise(self, num_results: int, failures: Mapping[int, Failure]) -> bool:
        """A step has num_results tokens and vectors, or what is in their place. Counts who has failed, unless there are
        doubts whose fault that is."""
        if not failures:
            self._num_alone = 0
            return False
        new = {request_id: failure for request_id, failure in failures.items() if request_id not in self._known}
        num_nan = sum(failure.cause is Cause.NAN for failure in failures.values())
        if 0 < num_nan == num_results:
            self._num_alone += len(new)
            if num_nan > 1 or self._num_alone >= _MOST_ALONE:
                return True
        for request_id, failure in new.items():
            logger.warning("request %d fails alone: %s", request_id, failure.message)
            stats.FAILED_REQUESTS.labels(failure.cause).inc()
        self._known.extend(new)
        return False

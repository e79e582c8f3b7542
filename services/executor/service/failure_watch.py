"""Detection of models that yield NaN for every request.

A request that yields NaN while others do not ends alone. If all requests of a step yield NaN, the weights may be
damaged: then a probe (`runner.probe`) decides.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from pagewire.services.executor import stats
from pagewire.services.executor.step.failures import Cause, Failure

logger = logging.getLogger(__name__)

# Limit of successive requests, each alone in its step, that yield NaN: a client may send such requests on purpose.
_MOST_ALONE = 3
_NUM_KNOWN = 1024  # a request may fail again in the next step, before the scheduler ends it


class OnlyNan(RuntimeError):
    """A step has yielded only NaN."""


class FailureWatch:
    """Counts the failing requests of one stream."""

    def __init__(self) -> None:
        self._num_alone = 0
        self._known: deque[int] = deque(maxlen=_NUM_KNOWN)  # requests that have failed

    def suspects_model(self, num_results: int, failures: Mapping[int, Failure]) -> bool:
        """Returns whether to probe the model after a step with num_results tokens and vectors and these failures. If
        not, the failures are counted and logged."""
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

"""Decode steps on a CPU, each recorded when a batch of its size first occurs: the counterpart of `cuda_graphs`.

Recording is an ordinary step that takes somewhat longer, so nothing is prepared and nothing padded.
"""

from __future__ import annotations

import logging

from torch import Tensor

from kernels.cpu.recording import Memory, NotRecorded, Recorded, record
from services.executor.cuda_graphs import Function

logger = logging.getLogger(__name__)


class RecordedSteps:
    """Steps of up to max_size requests; larger ones run eagerly, as a GPU's do beyond its largest graph."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._memory = Memory()
        self._recorded: dict[tuple[str, int], Recorded] = {}
        self._recordable = True  # the whole step: a part finds its inputs where the part before has always put them
        self._mode = "eager"  # of the last run

    def padded_size(self, num_reqs: int) -> int | None:
        return num_reqs if num_reqs <= self._max_size else None

    def mode(self, size: int | None) -> str:
        """How the last step, of this size, ran: captured, replayed or eager."""
        return "eager" if size is None else self._mode

    def run(self, name: str, size: int | None, function: Function) -> Tensor:
        """The function's result; if it was recorded for this size, in memory that the next run reuses."""
        if size is None or not self._recordable:
            self._mode = "eager"
            return function()
        recorded = self._recorded.get((name, size))
        if recorded is None:
            return self._record(name, size, function)
        self._mode = "replayed"
        recorded.replay()
        return recorded.output

    def _record(self, name: str, size: int, function: Function) -> Tensor:
        self._mode = "captured"
        try:
            recorded = self._recorded[name, size] = record(function, self._memory)
        except NotRecorded as error:
            self._mode, self._recordable = "eager", False
            logger.warning("decode steps run from Python, more slowly: %s", error.reason)
            return error.output
        return recorded.output

"""Steps on a CPU, each recorded when one of its shape first occurs: the counterpart of `cuda_graphs`.

Recording is an ordinary step that takes somewhat longer, so nothing is prepared. A uniform step is recorded as it is; a
step with prompts in it is padded to one of a few numbers of tokens, as there are too many shapes of them otherwise, and
what follows the forward pass runs eagerly.
"""

from __future__ import annotations

import bisect
import logging

from torch import Tensor

from pagewire.kernels.cpu.recording import Memory, NotRecorded, Recorded, record
from pagewire.services.executor.cuda_graphs import Function
from pagewire.services.executor.input_batch import BatchShape

logger = logging.getLogger(__name__)

MOST_TOKENS = 512
# Tokens of a step with prompts. Beyond the last, Python's part of the step is small; the steps between are such that
# padding costs less than Python. Products compute 8 or 16 tokens at once.
TOKENS = (*range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_TOKENS + 1, 32))


class RecordedSteps:
    """All uniform steps, and those with prompts that have at most 512 tokens; larger ones run eagerly, as a GPU's do
    beyond its largest graph."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int) -> None:
        """max_num_tokens: of a step with prompts, padding included."""
        self._max_num_seqs = max_num_seqs
        self._token_counts = [count for count in TOKENS if count <= max_num_tokens]
        self._memory = Memory()
        self._recorded: dict[tuple[str, int, int, int], Recorded] = {}
        # is_uniform of steps that cannot be recorded. Of a uniform step then no part is: one finds its inputs where the
        # part before has always put them.
        self._unrecordable: set[bool] = set()
        self._mode = "eager"  # of the last step

    def padded(self, shape: BatchShape) -> BatchShape:
        index = bisect.bisect_left(self._token_counts, shape.num_tokens)
        if shape.is_uniform or False in self._unrecordable or index == len(self._token_counts):
            return shape
        num_tokens = self._token_counts[index]
        # As many requests as there may be, and one that has the padding: they cost nothing, another recording would.
        return BatchShape(min(num_tokens, self._max_num_seqs) + 1, num_tokens, shape.num_sampled, num_tokens)

    def mode(self, shape: BatchShape) -> str:
        """How the last step, of this shape, ran: captured, replayed or eager."""
        return self._mode

    def run(self, name: str, shape: BatchShape, function: Function) -> Tensor:
        """The function's result; if it was recorded for this shape, in memory that the next run reuses."""
        if name == "forward":
            self._mode = "eager"
        if shape.is_uniform in self._unrecordable or not self._keeps(name, shape):
            return function()
        recorded = self._recorded.get(_key(name, shape))
        if recorded is None:
            return self._record(name, shape, function)
        self._mode = "replayed"
        recorded.replay()
        return recorded.output

    def _keeps(self, name: str, shape: BatchShape) -> bool:
        return shape.is_uniform or (name == "forward" and shape.num_tokens in self._token_counts)

    def _record(self, name: str, shape: BatchShape, function: Function) -> Tensor:
        self._mode = "captured"
        try:
            recorded = self._recorded[_key(name, shape)] = record(function, self._memory)
        except NotRecorded as error:
            self._mode = "eager"
            self._unrecordable.add(shape.is_uniform)
            kind = "uniform steps" if shape.is_uniform else "steps with prompts"
            logger.warning("%s run from Python, more slowly: %s", kind, error.reason)
            return error.output
        return recorded.output


def _key(name: str, shape: BatchShape) -> tuple[str, int, int, int]:
    """The forward pass is the same whoever samples."""
    return name, shape.num_reqs, shape.num_tokens, 0 if name == "forward" else shape.num_sampled

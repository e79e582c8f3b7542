"""Steps on a CPU, replayed as the first of their shape was recorded: the counterpart of `cuda_graphs`.

All steps are padded to one of a list of shapes. Recording is an ordinary step that takes 30 to 50 ms longer, so at
start only those of the warm-up are recorded. `missing` returns the others, which are recorded while no request waits
(`idle_recording`); a step of such a shape that comes earlier is recorded itself. What follows the forward pass of a
step with prompts runs eagerly: recorded, it would be 0.2 ms shorter.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence

from torch import Tensor

from pagewire.kernels.cpu.recording import Memory, NotRecorded, Recorded, record
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.graphs.cuda_graphs import Function
from pagewire.services.executor.step.limits import LARGE_STEP

logger = logging.getLogger(__name__)

MOST_TOKENS = LARGE_STEP
# Tokens of a step with prompts. Beyond the last, Python's part of the step is small; the steps between are such that
# padding costs less than Python. Products compute 8 or 16 tokens at once.
TOKENS = (*range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_TOKENS + 1, 32))
# Beside these, where there are drafts: a few requests with some drafts each are small steps, too.
TOKENS_WITH_DRAFTS = (*range(2, 8), *range(10, 16, 2), *range(20, 32, 4))
# Requests of a uniform step. A padded one costs as much as a real one without its attention, so there are at most an
# eighth of them; recordings cost next to nothing.
REQUESTS = (*range(1, 16), *(size for power in (16, 32, 64, 128, 256) for size in range(power, 2 * power, power // 8)))
MOST_REQUESTS = 512


class RecordedSteps:
    """Decode steps of up to 512 requests, and others of up to 512 tokens; larger ones run eagerly, as a GPU's do beyond
    its largest graph.

    Drafts are of any number, and a request's differ from its neighbour's. A request alone has a recording for each
    number; several share those by tokens with each other and with steps with prompts.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        *,
        most_tokens: int = MOST_TOKENS,
        requests: Sequence[int] = REQUESTS,
        max_draft_tokens: int = 0,
    ) -> None:
        """max_num_tokens: of a step, padding included. most_tokens: of a recorded step with prompts, likewise.
        requests: of uniform steps, rising, beside the most there can be; none: there are no such steps.
        max_draft_tokens: of a request."""
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._max_draft_tokens = max_draft_tokens
        counts = sorted({*TOKENS, *TOKENS_WITH_DRAFTS}) if max_draft_tokens else TOKENS
        self._token_counts = [count for count in counts if count <= min(max_num_tokens, most_tokens)]
        largest = min(max_num_seqs, max_num_tokens, MOST_REQUESTS)
        self._request_counts = [*(count for count in requests if count < largest), largest] if requests else []
        self._memory = Memory()
        self._recorded: dict[tuple[str, int, int, int], Recorded] = {}
        # is_uniform of steps that cannot be recorded. Of a uniform step then no part is: one finds its inputs where the
        # part before has always put them.
        self._unrecordable: set[bool] = set()
        self._mode = "eager"  # of the last step

    def padded(self, shape: BatchShape) -> BatchShape:
        if shape.is_uniform in self._unrecordable:
            return shape
        if shape.is_uniform and not self._goes_by_tokens(shape):
            num_reqs = _next(self._request_counts, shape.num_reqs)
            fits = num_reqs is not None and num_reqs * shape.max_query_len <= self._max_num_tokens
            return BatchShape.uniform(num_reqs, shape.max_query_len) if num_reqs and fits else shape
        num_tokens = _next(self._token_counts, shape.num_tokens)
        if num_tokens is None:
            return shape
        # As many positions are sampled as there are tokens, if there is room for so many.
        pads_samples = shape.has_drafts_only and num_tokens <= self._max_num_samples
        return self._with_prompts(num_tokens, num_tokens if pads_samples else shape.num_sampled)

    @property
    def _max_num_samples(self) -> int:
        return self._max_num_seqs * (1 + self._max_draft_tokens)

    def _goes_by_tokens(self, shape: BatchShape) -> bool:
        return shape.has_drafts_only and shape.num_reqs > 1

    def _with_prompts(self, num_tokens: int, num_sampled: int) -> BatchShape:
        # As many requests as there may be, and one that has the padding: they cost nothing, another recording would.
        return BatchShape(min(num_tokens, self._max_num_seqs) + 1, num_tokens, num_sampled, num_tokens)

    def missing(self) -> BatchShape | None:
        """The smallest shape that has not been recorded."""
        shapes = [BatchShape.uniform(count) for count in self._request_counts]
        if self._request_counts:
            lens = range(2, min(1 + self._max_draft_tokens, self._max_num_tokens) + 1)
            shapes += [BatchShape.uniform(1, query_len) for query_len in lens]
        for count in self._token_counts:
            has_drafts = self._max_draft_tokens > 0 and count <= self._max_num_samples
            shapes.append(self._with_prompts(count, num_sampled=count if has_drafts else 0))
        missing = (
            shape
            for shape in shapes
            if shape.is_uniform not in self._unrecordable and _key("forward", shape) not in self._recorded
        )
        return min(missing, key=lambda shape: shape.num_tokens, default=None)

    def mode(self, shape: BatchShape) -> str:
        """Returns how the last step, of this shape, ran: captured, replayed or eager."""
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
        if shape.is_uniform and not self._goes_by_tokens(shape):
            return shape.num_reqs in self._request_counts and shape.num_tokens <= self._max_num_tokens
        return (name == "forward" or shape.has_drafts_only) and shape.num_tokens in self._token_counts

    def _record(self, name: str, shape: BatchShape, function: Function) -> Tensor:
        self._mode = "captured"
        try:
            recorded = self._recorded[_key(name, shape)] = record(function, self._memory)
        except NotRecorded as error:
            self._mode = "eager"
            self._unrecordable.add(shape.is_uniform)
            kind = "uniform steps" if shape.is_uniform else "steps with prompts"
            logger.warning("%s are launched from Python, which is slower: %s", kind, error.reason)
            return error.output
        return recorded.output


def _next(counts: list[int], count: int) -> int | None:
    """The next of these that is no smaller; None: there is none."""
    index = bisect.bisect_left(counts, count)
    return counts[index] if index < len(counts) else None


def _key(name: str, shape: BatchShape) -> tuple[str, int, int, int]:
    """Returns the key of a recording. The forward pass does not depend on the sampled positions."""
    return name, shape.num_reqs, shape.num_tokens, 0 if name == "forward" else shape.num_sampled

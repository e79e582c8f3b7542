"""Recorded steps on a CPU: the first step of a shape is recorded, later ones replay it, as in `cuda_graphs`.

All steps are padded to one of a list of shapes. Recording is an ordinary step that takes 30 to 50 ms longer, so at
start only those of the warm-up are recorded. `missing` returns the others, which are recorded while no request waits
(`idle_recording`); if a step of such a shape comes earlier, that step is recorded. After the forward pass, a step with
prompts runs eagerly: recording the rest would save 0.2 ms.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from pagewire.kernels.cpu.recording import Memory, NotRecorded, Recorded, record
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.graphs.cuda_graphs import Function
from pagewire.services.executor.step.limits import LARGE_STEP

logger = logging.getLogger(__name__)

MOST_TOKENS = LARGE_STEP
# Tokens of a step with prompts. Beyond the last, Python's share of the step is small; the sizes are close enough that
# padding costs less than Python. Products compute 8 or 16 tokens at once.
TOKENS = (*range(8, 64, 8), *range(64, 256, 16), *range(256, MOST_TOKENS + 1, 32))
# Additional sizes with drafts: a few requests with some drafts each make small steps, too.
TOKENS_WITH_DRAFTS = (*range(2, 8), *range(10, 16, 2), *range(20, 32, 4))
# Requests of a uniform step. A padding request costs as much as a real one without its attention, so at most an eighth
# are padding; recordings cost almost nothing.
REQUESTS = (*range(1, 16), *(size for power in (16, 32, 64, 128, 256) for size in range(power, 2 * power, power // 8)))
MOST_REQUESTS = 512


class RecordedSteps:
    """Records decode steps of up to 512 requests, and others of up to 512 tokens; larger ones run eagerly, as on a GPU
    beyond its largest graph.

    The number of drafts varies between requests. A lone request has a recording for each number; several requests
    share the recordings by tokens with steps with prompts.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        *,
        most_tokens: int = MOST_TOKENS,
        requests: Sequence[int] = REQUESTS,
        max_draft_tokens: int = 0,
        with_adapters: bool = False,
    ) -> None:
        """max_num_tokens: the limit of a step, padding included. most_tokens: the same of a recorded step with prompts.
        requests: sizes of uniform steps, ascending, in addition to the largest possible; empty: there are no uniform
        steps. max_draft_tokens: the limit of a request. with_adapters: whether steps may have adapters; these have
        recordings of their own."""
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._max_draft_tokens = max_draft_tokens
        self._adapters = (False, True) if with_adapters else (False,)
        counts = sorted({*TOKENS, *TOKENS_WITH_DRAFTS}) if max_draft_tokens else TOKENS
        self._token_counts = [count for count in counts if count <= min(max_num_tokens, most_tokens)]
        largest = min(max_num_seqs, max_num_tokens, MOST_REQUESTS)
        self._request_counts = [*(count for count in requests if count < largest), largest] if requests else []
        # Logits of more positions than a step of one token each has would take memory only for recordings.
        self._most_samples = largest if max_draft_tokens else 0
        self._memory = Memory()
        self._recorded: dict[tuple[str, int, int, int, bool], Recorded] = {}
        # The kinds of steps that cannot be recorded. If one part of a uniform step cannot be, none is recorded: each
        # part finds its inputs where the previous part has always put them.
        self._unrecordable: set[tuple[bool, bool]] = set()
        self._mode = "eager"  # of the last step

    def padded(self, shape: BatchShape) -> BatchShape:
        return replace(self._padded(shape), has_adapters=shape.has_adapters)

    def _padded(self, shape: BatchShape) -> BatchShape:
        if _kind(shape) in self._unrecordable:
            return shape
        if shape.is_uniform and not self._goes_by_tokens(shape):
            num_reqs = _next(self._request_counts, shape.num_reqs)
            fits = num_reqs is not None and num_reqs * shape.max_query_len <= self._max_num_tokens
            return BatchShape.uniform(num_reqs, shape.max_query_len) if num_reqs and fits else shape
        num_tokens = _next(self._token_counts, shape.num_tokens)
        if num_tokens is None:
            return shape
        # Every token is a sampled position, if sampling is recorded.
        pads_samples = shape.has_drafts_only and num_tokens <= self._most_samples
        return self._with_prompts(num_tokens, num_tokens if pads_samples else shape.num_sampled)

    def _goes_by_tokens(self, shape: BatchShape) -> bool:
        return shape.has_drafts_only and shape.num_reqs > 1

    def _with_prompts(self, num_tokens: int, num_sampled: int) -> BatchShape:
        # The largest number of requests, plus one that takes the padding: they cost nothing, another recording would.
        return BatchShape(min(num_tokens, self._max_num_seqs) + 1, num_tokens, num_sampled, num_tokens)

    def missing(self) -> BatchShape | None:
        """The smallest shape that has not been recorded."""
        shapes = [BatchShape.uniform(count) for count in self._request_counts]
        if self._request_counts:
            lens = range(2, min(1 + self._max_draft_tokens, self._max_num_tokens) + 1)
            shapes += [BatchShape.uniform(1, query_len) for query_len in lens]
        for count in self._token_counts:
            shapes.append(self._with_prompts(count, num_sampled=count if count <= self._most_samples else 0))
        shapes = [replace(shape, has_adapters=adapters) for adapters in self._adapters for shape in shapes]
        missing = (
            shape
            for shape in shapes
            if _kind(shape) not in self._unrecordable and _key("forward", shape) not in self._recorded
        )
        return min(missing, key=lambda shape: (shape.has_adapters, shape.num_tokens), default=None)

    def mode(self, shape: BatchShape) -> str:
        """Returns how the last step, of this shape, ran: captured, replayed or eager."""
        return self._mode

    def run(self, name: str, shape: BatchShape, function: Function) -> Tensor:
        """Returns the function's result; if it was recorded for this shape, the next run reuses its memory."""
        if name == "forward":
            self._mode = "eager"
        if _kind(shape) in self._unrecordable or not self._keeps(name, shape):
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
        has_samples = shape.has_drafts_only and shape.num_tokens <= self._most_samples
        return (name == "forward" or has_samples) and shape.num_tokens in self._token_counts

    def _record(self, name: str, shape: BatchShape, function: Function) -> Tensor:
        self._mode = "captured"
        try:
            recorded = self._recorded[_key(name, shape)] = record(function, self._memory)
        except NotRecorded as error:
            self._mode = "eager"
            self._unrecordable.add(_kind(shape))
            kind = "uniform steps" if shape.is_uniform else "steps with prompts"
            logger.warning("%s are launched from Python, which is slower: %s", kind, error.reason)
            return error.output
        return recorded.output


def _next(counts: list[int], count: int) -> int | None:
    """Returns the first of these that is no smaller; None if there is none."""
    index = bisect.bisect_left(counts, count)
    return counts[index] if index < len(counts) else None


def _kind(shape: BatchShape) -> tuple[bool, bool]:
    return shape.is_uniform, shape.has_adapters


def _key(name: str, shape: BatchShape) -> tuple[str, int, int, int, bool]:
    """Returns the key of a recording. The forward pass does not depend on the sampled positions."""
    num_sampled = 0 if name == "forward" else shape.num_sampled
    return name, shape.num_reqs, shape.num_tokens, num_sampled, shape.has_adapters

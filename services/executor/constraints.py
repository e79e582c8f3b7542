"""Rows whose tokens are restricted, by a grammar or a thinking budget, and the masks that say how.

A mask depends on the token before, which is on the device only while the next step is launched. So a thread waits for
the tokens of each step, advances the matchers and fills the next masks, while the device runs the forward pass that
follows; only sampling waits for it. Nobody else does, and a step without such a row costs nothing more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from pagewire.services.executor import stats
from pagewire.services.executor.grammar.matcher import Matcher
from pagewire.services.executor.grammar.threads import grammar_thread
from pagewire.services.executor.step import InvalidStep, StepOutput

logger = logging.getLogger(__name__)


class Constraints:
    """By row [max_num_seqs]. All calls come from the device thread."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._shape = (max_num_seqs, -(-vocab_size // 32))
        self._masks = np.empty((0, 0), dtype=np.int32)  # of the shape, from the first grammar on
        self._matchers: dict[int, Matcher] = {}  # by row
        self._first: dict[int, int] = {}  # by row: tokens of the sequence from which on it is restricted
        self._failed: dict[Matcher, str] = {}  # that raised, and what
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # what the thread was last given

    def fill(self, row: int, matcher: Matcher, num_prompt_tokens: int) -> None:
        """A request with a matcher has the row."""
        if self._thread is None:
            self._thread = grammar_thread("masks")
            self._masks = np.empty(self._shape, dtype=np.int32)
        self._matchers[row] = matcher
        self._first[row] = num_prompt_tokens + matcher.num_free
        stats.CONSTRAINED_REQUESTS.set(len(self._matchers))
        self._submit(lambda: self._advance_one(matcher, (), row))

    def clear(self, row: int) -> None:
        if (matcher := self._matchers.pop(row, None)) is not None:
            self._failed.pop(matcher, None)
            if not self._matchers:
                self._last = None  # whatever it raises is nobody's
            stats.CONSTRAINED_REQUESTS.set(len(self._matchers))

    def masks(self, rows: np.ndarray, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """(batch indices int32 [n], masks int32 [n, ceil(vocab_size / 32)]) of the rows [S] of the positions that are
        sampled, once the tokens before them are known. None: none is restricted. num_tokens [S]: of their sequences.

        Raises InvalidStep for a row with drafts: its later positions would need tokens that are not chosen yet.
        """
        if not self._matchers:
            return None
        counts = num_tokens.tolist()
        indices = [
            i for i, row in enumerate(rows.tolist()) if row in self._matchers and self._restricts(row, counts[i])
        ]
        if not indices:
            return None
        if len({*rows[indices].tolist()}) < len(indices):
            raise InvalidStep("a request with a grammar or a thinking budget has drafts")
        if self._last is not None:
            self._last.result()
        # Copies, as the thread goes on to fill those of the next step.
        return np.array(indices, dtype=np.int32), self._masks[rows[indices]]

    def _restricts(self, row: int, num_tokens: int) -> bool:
        return num_tokens >= self._first[row] and not self._matchers[row].is_over

    def errors(self, rows: np.ndarray) -> dict[int, str]:
        """Index into rows -> why its grammar cannot be followed any further; `masks` was called for them."""
        if not self._matchers:
            return {}
        matchers = ((index, self._matchers.get(row)) for index, row in enumerate(rows.tolist()))
        errors = ((index, matcher.error or self._failed.get(matcher)) for index, matcher in matchers if matcher)
        return {index: error for index, error in errors if error}

    def follow(self, output: StepOutput, rows: np.ndarray) -> None:
        """These rows [R] are sampled in a step that was launched: their matchers get the tokens when they are there."""
        if not self._matchers:
            return
        indices = [(index, row) for index, row in enumerate(rows.tolist()) if row in self._matchers]
        if matchers := [(index, row, self._matchers[row]) for index, row in indices]:
            self._submit(lambda: self._advance(output, matchers))

    def _advance(self, output: StepOutput, matchers: list[tuple[int, int, Matcher]]) -> None:
        tokens = output.wait()
        start = time.perf_counter()
        ends = tokens.num_tokens.cumsum().tolist()
        token_ids = tokens.token_ids.tolist()
        for index, row, matcher in matchers:
            if output.request_ids[index] in tokens.failures:
                continue
            self._advance_one(matcher, token_ids[ends[index - 1] if index else 0 : ends[index]], row)
        stats.GRAMMAR_MASK_SECONDS.observe(time.perf_counter() - start)

    def _advance_one(self, matcher: Matcher, token_ids: Sequence[int], row: int) -> None:
        """What a matcher raises ends its own request."""
        if matcher in self._failed:
            return
        try:
            matcher.advance(token_ids)
            matcher.fill_mask(self._masks[row])
        except Exception as error:
            logger.exception("a grammar failed")
            self._failed[matcher] = f"the grammar cannot be followed any further: {type(error).__name__}: {error}"
            self._masks[row].fill(-1)

    def _submit(self, job: Callable[[], None]) -> None:
        """Jobs run in order: a failure is raised by `masks`, when nothing later hides it."""
        assert self._thread is not None
        previous = self._last

        def run() -> None:
            if previous is not None:
                previous.result()
            job()

        self._last = self._thread.submit(run)

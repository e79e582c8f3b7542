"""Masks for rows with a grammar or a thinking budget.

A mask depends on the token before it, which only the device has while the next step is launched. So a thread waits
for the tokens of each step, advances the matchers and fills the next masks while the device runs the forward pass that
follows. Only sampling of such rows waits for the thread; a step without them costs nothing more. Behind drafts, the
thread fills a mask for each draft in that time, and rewinds the matcher. A proposer that chooses permitted drafts waits
until the matchers are advanced, so masks are filled after that (`fill_masks`). A request that takes the thread too long
ends, as the others of its step wait for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from pagewire.services.executor import stats
from pagewire.services.executor.grammar.look_ahead import fill_masks, fitting
from pagewire.services.executor.grammar.threads import grammar_thread
from pagewire.services.executor.step.matcher import Matcher
from pagewire.services.executor.step.step import StepOutput

logger = logging.getLogger(__name__)

# Processor time of one token above which its request ends. Where its grammar was tried, none took more than half of it.
_MAX_TOKEN_SECONDS = 0.1
# Processor time for all tokens of a step, above which the slowest requests end, if their tokens usually take
# _MAX_USUAL_SECONDS or longer. Those of common grammars take 1 ms, and a few ms where they come to something new.
_MAX_STEP_SECONDS, _MAX_USUAL_SECONDS = 0.1, 0.005
_WEIGHT = 0.25  # of the last token


@dataclass(eq=False)
class _Restricted:
    """A request with a matcher. Only the thread uses the matcher; the device thread reads the other fields."""

    matcher: Matcher
    mask: np.ndarray  # int32 [ceil(vocab_size / 32)], behind its last token
    first: int  # length of the sequence from which on it is restricted
    is_stale: bool = True  # whether the mask is
    is_over: bool = False
    error: str = ""
    usual_seconds: float = 0.0  # for a token

    def advance(self, token_ids: Sequence[int]) -> None:
        def advance() -> None:
            self.matcher.advance(token_ids)
            self.is_stale, self.is_over = True, self.matcher.is_over

        self._guarded(advance)

    def fill_mask(self) -> None:
        def fill() -> None:
            self.matcher.fill_mask(self.mask)
            self.is_stale, self.error = False, self.matcher.error

        if self.is_stale:
            self._guarded(fill)

    def fitting(self, proposed: Sequence[int], most: int) -> list[int]:
        drafts = list[int]()
        self._guarded(lambda: drafts.extend(fitting(self.matcher, proposed, most)))
        return drafts

    def fill_masks(self, drafts: Sequence[int], masks: np.ndarray) -> None:
        masks.fill(-1)
        self._guarded(lambda: fill_masks(self.matcher, drafts, masks))

    def give_up(self, seconds: float) -> None:
        """Ends the request. seconds: the processor time for its last token."""
        if not self.error:
            self.matcher.give_up(
                f"a token takes {1000 * seconds:.0f} ms of a processor there, and other requests wait for it"
            )
            self.error = self.matcher.error
            if self.error:
                self.mask.fill(-1)

    def _guarded(self, use_matcher: Callable[[], None]) -> None:
        """Calls a function of the matcher; an error ends only its own request."""
        if self.error:
            return
        try:
            use_matcher()
        except Exception:
            logger.exception("the matcher of a request failed; the request ends")
            self.error = "the grammar cannot be followed from here on: an internal error; the executor's log has it"
            self.mask.fill(-1)


class GrammarConstraints:
    """The `sampling.constraints.Constraints` of matchers, by row [max_num_seqs]."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._shape = (max_num_seqs, -(-vocab_size // 32))
        self._masks = np.empty((0, 0), dtype=np.int32)  # of the shape, from the first grammar on
        self._restricted: dict[int, _Restricted] = {}  # by row
        # By row: of the step that is launched, [its drafts, ceil(vocab_size / 32)]. The thread fills them.
        self._behind_drafts: dict[int, np.ndarray] = {}
        self._are_filled_late = False  # masks, so that a proposer does not wait for them
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None  # what the thread was last given

    def fill(self, row: int, matcher: Matcher, num_prompt_tokens: int) -> None:
        """Gives the row to a request with a matcher."""
        if self._thread is None:
            self._thread = grammar_thread("masks")
            self._masks = np.empty(self._shape, dtype=np.int32)
        request = _Restricted(matcher, self._masks[row], num_prompt_tokens + matcher.num_free)
        self._restricted[row] = request
        stats.CONSTRAINED_REQUESTS.set(len(self._restricted))
        if not self._are_filled_late:
            self._submit(lambda: _fill_masks([request]))

    def clear(self, row: int) -> None:
        if self._restricted.pop(row, None) is not None:
            if not self._restricted:
                self._last = None  # its error no longer concerns any request
            stats.CONSTRAINED_REQUESTS.set(len(self._restricted))

    def are_restricted(self, rows: np.ndarray, num_tokens: np.ndarray | None = None) -> list[int]:
        """Returns indices into rows of those with restricted next tokens. num_tokens [n]: of their sequences; None: not
        known."""
        if not self._restricted:
            return []
        counts = None if num_tokens is None else num_tokens.tolist()
        found = ((index, self._restricted.get(row)) for index, row in enumerate(rows.tolist()))
        return [
            index
            for index, request in found
            if request is not None and not request.is_over and (counts is None or counts[index] >= request.first)
        ]

    def fitting(self, rows: Sequence[int], proposed: Sequence[Sequence[int]], most: Sequence[int]) -> list[list[int]]:
        """Returns drafts for these restricted rows [n]: forced tokens, and proposed ones that are permitted; at most
        `most` [n] each. Waits for the tokens of all launched steps. From the first call on, masks are filled
        only by `fill_masks`."""
        self._are_filled_late = True
        requests = [self._restricted[row] for row in rows]
        drafts = list[list[int]]()

        def find() -> None:
            drafts.extend(map(_Restricted.fitting, requests, proposed, most))

        self._submit(find).result()
        return drafts

    def fill_masks(self) -> None:
        """Fills the masks behind the last tokens that are not filled yet. Call it in each step, after `fitting`."""
        if self._are_filled_late and self._restricted:
            requests = list(self._restricted.values())
            self._submit(lambda: _fill_masks(requests))

    def look_ahead(self, rows: Sequence[int], drafts: Callable[[], Sequence[Sequence[int]]], most: int) -> None:
        """Fills masks for the drafts of the step that is launched next, in these restricted rows. drafts: waits for
        them, and returns at most `most` for each row; called on the thread."""
        requests = [self._restricted[row] for row in rows]
        masks = np.empty((len(rows), most, self._shape[1]), dtype=np.int32)
        self._behind_drafts = dict(zip(rows, masks, strict=True))

        def fill() -> None:
            drafted = drafts()
            with _Times() as times:
                for request, of_request, of_masks in zip(requests, drafted, masks, strict=True):
                    with times.of(request, len(of_request)):
                        request.fill_masks(of_request, of_masks[: len(of_request)])

        self._submit(fill)

    def masks(
        self, rows: np.ndarray, num_tokens: np.ndarray | None, offsets: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the masks of restricted positions (`sampling.constraints`); drafts are those of `look_ahead`."""
        indices = self.are_restricted(rows, num_tokens)
        behind_drafts, self._behind_drafts = self._behind_drafts, {}
        if not indices:
            return None
        if self._last is not None:
            self._last.result()
        places = rows[indices]
        masks = self._masks[places]  # copies, as the thread goes on to fill those of the next step
        if offsets is not None:
            for i, (row, offset) in enumerate(zip(places.tolist(), offsets[indices].tolist(), strict=True)):
                if offset:
                    masks[i] = behind_drafts[row][offset - 1]
        return np.array(indices, dtype=np.int32), masks

    def errors(self, rows: np.ndarray) -> dict[int, str]:
        """Returns, by index into rows, why an output cannot continue. Call it after `masks`."""
        if not self._restricted:
            return {}
        requests = ((index, self._restricted.get(row)) for index, row in enumerate(rows.tolist()))
        return {index: request.error for index, request in requests if request is not None and request.error}

    def follow(self, output: StepOutput, rows: np.ndarray) -> None:
        """Gives the tokens of a launched step to the matchers of the sampled rows [R], once these tokens are known."""
        if not self._restricted:
            return
        found = ((index, self._restricted.get(row)) for index, row in enumerate(rows.tolist()))
        if requests := [(index, request) for index, request in found if request is not None]:
            fills_masks = not self._are_filled_late
            self._submit(lambda: self._advance(output, requests, fills_masks))

    def _advance(self, output: StepOutput, requests: list[tuple[int, _Restricted]], fills_masks: bool) -> None:
        tokens = output.wait()
        ends = tokens.num_tokens.cumsum().tolist()
        token_ids = tokens.token_ids.tolist()
        with _Times() as times:
            for index, request in requests:
                if output.request_ids[index] not in tokens.failures:
                    gained = token_ids[ends[index - 1] if index else 0 : ends[index]]
                    with times.of(request, len(gained)):
                        request.advance(gained)
                        if fills_masks:
                            request.fill_mask()

    def _submit(self, job: Callable[[], None]) -> Future[None]:
        """Runs jobs in order; `masks` raises their errors."""
        assert self._thread is not None
        previous = self._last

        def run() -> None:
            if previous is not None:
                previous.result()
            job()

        self._last = self._thread.submit(run)
        return self._last


def _fill_masks(requests: Sequence[_Restricted]) -> None:
    with _Times() as times:
        for request in requests:
            with times.of(request):
                request.fill_mask()


class _Times:
    """The time that the thread takes for the requests of one step. At its end, those that take too long end."""

    def __enter__(self) -> _Times:
        self._start = time.perf_counter()
        self._spent: list[tuple[float, float, _Restricted]] = []  # for a token; in all
        return self

    @contextmanager
    def of(self, request: _Restricted, num_tokens: int = 1) -> Iterator[None]:
        """Measures the processor time of the context, which is for so many tokens of the request."""
        start = time.thread_time()
        yield
        seconds = time.thread_time() - start
        of_token = seconds / max(num_tokens, 1)
        request.usual_seconds += _WEIGHT * (of_token - request.usual_seconds)
        self._spent.append((of_token, seconds, request))

    def __exit__(self, *_: object) -> None:
        excess = sum(seconds for _, seconds, _ in self._spent) - _MAX_STEP_SECONDS
        for of_token, seconds, request in sorted(self._spent, key=itemgetter(0), reverse=True):
            if of_token > _MAX_TOKEN_SECONDS or (excess > 0 and request.usual_seconds > _MAX_USUAL_SECONDS):
                request.give_up(of_token)
                excess -= seconds
        stats.GRAMMAR_MASK_SECONDS.observe(time.perf_counter() - self._start)

"""Outputs that think before they answer: a budget for the reasoning, a grammar for the answer alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from pagewire.services.executor.grammar.matcher import GrammarMatcher, TokenBits
from pagewire.v1.common_pb2 import SamplingParams

Mark = tuple[int, ...]
# The state that changes as an output grows, except its tail and the place in the answer's grammar.
_PROGRESS = (
    "_num_tokens",
    "_num_thought",
    "_thinks",
    "_closes",
    "_answers",
    "_openings",
    "_may_answer_at_once",
)


class ThinkingMatcher:
    """A `Matcher`: permits any token in the reasoning, forces its end at the budget's end, then follows the answer.

    Without a grammar the reasoning begins at its mark, anywhere before the answer's mark. With a grammar the output
    either begins with a mark or is the answer.
    """

    def __init__(
        self, params: SamplingParams, answer: GrammarMatcher | None, eos_token_ids: Collection[int], vocab_size: int
    ) -> None:
        """params: parameters with `thinking`. answer: the matcher of the answer's grammar, at its start."""
        thinking = params.thinking
        self._start: Mark = tuple(thinking.start.token_ids)
        self._end: Mark = tuple(thinking.end.token_ids)
        self._answer_mark: Mark = tuple(thinking.answer.token_ids) or self._end
        self._closing: Mark = tuple(thinking.closing.token_ids) or self._end
        self._budget = thinking.budget if thinking.HasField("budget") else None
        self._answer = answer
        self._num_words = -(-vocab_size // 32)
        self._eos_tokens = TokenBits(eos_token_ids)
        self._end_tokens = TokenBits({*eos_token_ids, *params.stop_token_ids})
        self._min_tokens = params.min_tokens
        longest = max(map(len, (self._start, self._end, self._answer_mark, self._closing)))
        self._tail: deque[int] = deque(maxlen=longest)  # the output's last tokens
        self._num_tokens = 0  # before the answer
        self._num_thought = 0  # of these, in the reasoning
        self._thinks = thinking.begun
        self._closes = self._is_used_up  # whether the reasoning is being closed, which lasts until the answer
        self._answers = False
        # Marks that the output begins with, while it has not reached the end of one.
        self._openings: set[Mark] = set()
        self._may_answer_at_once = answer is not None and not thinking.begun
        if self._may_answer_at_once:
            self._openings = self._possible_openings()
        self.num_free = self._budget if answer is None and self._budget is not None else 0

    def _possible_openings(self) -> set[Mark]:
        """Returns the opening marks that no answer begins with."""
        assert self._answer is not None
        mask = np.empty(self._num_words, dtype=np.int32)
        self._answer.fill_mask(mask)
        return {mark for mark in {self._start, self._answer_mark} - {self._end} if not _has(mask, mark[0])}

    @property
    def error(self) -> str:
        return self._answer.error if self._answer is not None else ""

    def give_up(self, reason: str) -> None:
        if self._answer is not None:  # reasoning takes no time
            self._answer.give_up(reason)

    @property
    def is_over(self) -> bool:
        return self._answers and self._answer is None

    @property
    def _is_used_up(self) -> bool:
        return self._thinks and self._budget is not None and self._num_thought >= self._budget

    def advance(self, token_ids: Sequence[int]) -> None:
        for index, token_id in enumerate(token_ids):
            if self._may_answer_at_once:
                self._may_answer_at_once = False
                self._answers = all(mark[0] != token_id for mark in self._openings)
            if self._answers:
                if self._answer is not None:
                    self._answer.advance(token_ids[index:])
                return
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        """Counts a token before the answer."""
        self._num_tokens += 1
        self._num_thought += self._thinks
        self._tail.append(token_id)
        self._openings = {mark for mark in self._openings if len(mark) > self._num_tokens and self._begins_with(mark)}
        if self._ends_with(self._answer_mark):
            self._answers = True
            if self._answer is not None:
                self._answer.skip(self._num_tokens)
        elif self._thinks and self._ends_with(self._end):
            self._thinks = False
            self._num_thought -= 1
        elif self._ends_with(self._start):
            self._thinks = True
            if self._num_tokens == len(self._start):  # what the prompt has begun is begun again
                self._num_thought = 0
        self._closes |= self._is_used_up

    def _begins_with(self, mark: Mark) -> bool:
        return tuple(self._tail)[-self._num_tokens :] == mark[: self._num_tokens]

    def _ends_with(self, mark: Mark) -> bool:
        return bool(mark) and self._tail[-1] == mark[-1] and tuple(self._tail)[-len(mark) :] == mark

    def fill_mask(self, mask: np.ndarray) -> None:
        if self._answers or self._may_answer_at_once:
            mask.fill(-1) if self._answer is None else self._answer.fill_mask(mask)
        elif self._closes or self._openings:
            mask.fill(0)
        else:
            self._fill_any(mask)
        if self._closes and not self._answers:
            TokenBits(self._rest_of_closing()[:1]).allow(mask)
        TokenBits(mark[self._num_tokens] for mark in self._openings).allow(mask)

    def allows(self, token_id: int) -> bool:
        if self._answers:
            return self._answer is None or self._answer.allows(token_id)
        mask = np.empty(self._num_words, dtype=np.int32)
        self.fill_mask(mask)
        return _has(mask, token_id)

    def forced(self) -> Sequence[int]:
        if self._answers:
            return self._answer.forced() if self._answer is not None else ()
        if self._closes and not self._openings:
            return self._rest_of_closing()
        if len(self._openings) == 1 and not self._closes and not self._may_answer_at_once:
            return next(iter(self._openings))[self._num_tokens :]
        return ()

    def place(self) -> Any:
        answer = self._answer.place() if self._answer is not None else None
        return tuple(getattr(self, name) for name in _PROGRESS), tuple(self._tail), answer

    def go_back(self, place: Any) -> None:
        progress, tail, answer = place
        for name, value in zip(_PROGRESS, progress, strict=True):
            setattr(self, name, value)
        self._tail = deque(tail, self._tail.maxlen)
        if self._answer is not None:
            self._answer.go_back(answer)

    def _fill_any(self, mask: np.ndarray) -> None:
        """Permits any token, but not the end before an answer with a grammar."""
        mask.fill(-1)
        if self._answer is not None:
            self._eos_tokens.forbid(mask)
            if self._num_tokens < self._min_tokens:
                self._end_tokens.forbid(mask)

    def _rest_of_closing(self) -> Mark:
        """Returns the rest of the closing, behind the part that the output ends with."""
        tail, closing = tuple(self._tail), self._closing
        return closing[max((size for size in range(1, len(closing)) if tail[-size:] == closing[:size]), default=0) :]


def _has(mask: np.ndarray, token_id: int) -> bool:
    return bool(mask[token_id // 32] >> (token_id % 32) & 1)

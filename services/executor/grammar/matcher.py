"""The matcher of a grammar, and sets of tokens as bit masks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagewire.services.executor.grammar.schema.engine_errors import FEWER, is_too_complex
from pagewire.v1.common_pb2 import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)


class TokenBits:
    """A set of tokens as a bit mask."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        ids = np.array(sorted(set(token_ids)), dtype=np.int64)
        self._words, self._bits = ids // 32, (1 << (ids % 32)).astype(np.uint32).view(np.int32)

    def allow(self, mask: np.ndarray) -> None:
        np.bitwise_or.at(mask, self._words, self._bits)

    def forbid(self, mask: np.ndarray) -> None:
        np.bitwise_and.at(mask, self._words, ~self._bits)


class GrammarMatcher:
    """The place in a grammar. A `Matcher`."""

    num_free = 0
    is_over = False

    def __init__(
        self,
        compiled: LLMatcher,
        params: SamplingParams,
        eos_token_ids: Collection[int],
        on_complex: Callable[[], None] = lambda: None,
    ) -> None:
        """compiled: at the grammar's start, where it stays. on_complex: called when the grammar takes too long or too
        much memory to follow; all matchers of a compiled grammar share that memory."""
        self._compiled = compiled
        self._form = params.grammar.WhichOneof("form") or "grammar"
        self._on_complex = on_complex
        self._matcher = compiled.deep_copy()
        self._consumed: list[int] = []  # by the matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._min_tokens = params.min_tokens
        self._ignores_eos = params.ignore_eos
        self._end_tokens = TokenBits({*eos_token_ids, *params.stop_token_ids})
        self._eos_tokens = TokenBits(eos_token_ids)
        self._allowed = TokenBits(params.allowed_token_ids) if params.allowed_token_ids else None
        self._num_tokens = 0  # of the output
        self._has_ended = False
        self.error = ""  # why the grammar cannot be followed any further, for the client

    def skip(self, num_tokens: int) -> None:
        """Counts tokens of the output that come before the part with the grammar."""
        self._num_tokens += num_tokens

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._has_ended or self.error:
                return
            self._num_tokens += 1
            if token_id in self._eos_token_ids:
                self._has_ended = True
            elif self._matcher.consume_token(token_id):
                self._consumed.append(token_id)
            else:
                self._fail(f"token {token_id} of the output does not fit it")

    def fill_mask(self, mask: np.ndarray) -> None:
        if not self._has_ended and not self.error:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self._fail("the executor's log has the cause")
            elif self._allowed is not None:
                self._keep_allowed(mask, self._allowed)
        if self._has_ended or self.error:
            mask.fill(-1)
        elif self._ignores_eos or self._num_tokens < self._min_tokens:
            self._put_off_end(mask)

    def allows(self, token_id: int) -> bool:
        if self._has_ended or self.error:
            return False
        if token_id in self._eos_token_ids:
            return self._matcher.is_accepting()
        return self._matcher.validate_tokens([token_id]) == 1

    def forced(self) -> Sequence[int]:
        if self._has_ended or self.error:
            return ()
        if self._matcher.is_stopped():  # it is complete, and nothing can be added
            return sorted(self._eos_token_ids)[:1]
        return self._matcher.compute_ff_tokens()

    def place(self) -> tuple[int, int, bool, str]:
        return len(self._consumed), self._num_tokens, self._has_ended, self.error

    def go_back(self, place: tuple[int, int, bool, str]) -> None:
        num_consumed, self._num_tokens, self._has_ended, self.error = place
        num_wrong = len(self._consumed) - num_consumed
        del self._consumed[num_consumed:]
        if self.error or (not self._matcher.is_error() and (not num_wrong or self._matcher.rollback(num_wrong))):
            return
        # The grammar has become too complex on a path that the output need not take. A matcher never leaves that state.
        self._matcher = self._compiled.deep_copy()
        self._matcher.consume_tokens(self._consumed)

    def _keep_allowed(self, mask: np.ndarray, allowed: TokenBits) -> None:
        """Keeps allowed tokens in the mask; if none is left, an output with a complete grammar may end."""
        for tokens in (allowed, self._eos_tokens):
            kept = np.zeros_like(mask)
            tokens.allow(kept)
            kept &= mask
            if kept.any():
                mask[:] = kept
                return
        self._fail("none of allowed_token_ids may follow")

    def _put_off_end(self, mask: np.ndarray) -> None:
        """Removes the tokens that end the output, unless only they are possible."""
        others = mask.copy()
        self._end_tokens.forbid(others)
        if others.any():
            mask[:] = others

    def give_up(self, reason: str) -> None:
        if not self.error:
            self._fail(f"{reason}; {FEWER}")
            self._on_complex()

    def _fail(self, reason: str) -> None:
        error = self._matcher.get_error()
        if is_too_complex(error):
            reason = f"it becomes too complex there; {FEWER}"
            self._on_complex()
        elif error:
            logger.warning("a grammar cannot be followed: %s", " ".join(error.split())[:1000])
        self.error = f"{self._form}: it cannot be followed behind token {self._num_tokens} of the output: {reason}"

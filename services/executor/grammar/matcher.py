"""One request's place in its grammar."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from llguidance import LLMatcher

from pagewire.v1.common_pb2 import SamplingParams


class Matcher:
    """Says which tokens may follow. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, params: SamplingParams, eos_token_ids: Collection[int]) -> None:
        """matcher: at the grammar's start, and nobody else's."""
        self._matcher = matcher
        self._eos_token_ids = frozenset(eos_token_ids)
        self._min_tokens = params.min_tokens
        self._ignores_eos = params.ignore_eos
        self._end_token_ids = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), dtype=np.int64)
        self._num_tokens = 0  # of the output
        self._has_ended = False
        self.error = ""  # why the grammar cannot be followed any further, for the client

    def advance(self, token_ids: Iterable[int]) -> None:
        """The output has these tokens more."""
        for token_id in token_ids:
            if self._has_ended or self.error:
                return
            self._num_tokens += 1
            if token_id in self._eos_token_ids:
                self._has_ended = True
            elif not self._matcher.consume_token(token_id):
                self._fail(f"token {token_id} of the output does not fit it")

    def fill_mask(self, mask: np.ndarray) -> None:
        """Sets bit t % 32 of mask[t // 32], int32 [ceil(vocab_size / 32)], for each token t that may follow.

        Where nothing is known, because the output has ended or there is an error, any may.
        """
        if not self._has_ended and not self.error:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            if self._matcher.is_error():
                self._fail("it has become too complex")
        if self._has_ended or self.error:
            mask.fill(-1)
        elif self._ignores_eos or self._num_tokens < self._min_tokens:
            self._put_off_end(mask)

    def _put_off_end(self, mask: np.ndarray) -> None:
        """Without the tokens that end the output, unless no others are possible."""
        others = mask.copy()
        words, bits = self._end_token_ids // 32, (1 << (self._end_token_ids % 32)).astype(np.uint32).view(np.int32)
        np.bitwise_and.at(others, words, ~bits)
        if others.any():
            mask[:] = others

    def _fail(self, reason: str) -> None:
        detail = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())[:200]
        self.error = f"the grammar cannot be followed any further: {reason}{f' ({detail})' if detail else ''}"

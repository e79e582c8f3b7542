"""The seam for restricted output: masks of the tokens that may follow in each row."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from pagewire.services.executor.step.matcher import Matcher
from pagewire.services.executor.step.step import InvalidStep, StepOutput


class Constraints(Protocol):
    """Rows with restricted next tokens, [max_num_seqs]. All calls come from the device thread."""

    def fill(self, row: int, matcher: Matcher, num_prompt_tokens: int) -> None:
        """Gives the row to a request with a matcher."""

    def clear(self, row: int) -> None:
        """Frees the row, whether it was restricted or not."""

    def masks(
        self, rows: np.ndarray, num_tokens: np.ndarray | None, offsets: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns (batch indices int32 [n], masks int32 [n, ceil(vocab_size / 32)]) of the restricted positions among
        the sampled ones, given by rows [S]; None: no position is restricted. Waits for the tokens before them.

        num_tokens [S]: tokens of their sequences; None: not known. offsets int64 [S]: the number of drafts among
        these; None: no drafts.
        """

    def errors(self, rows: np.ndarray) -> dict[int, str]:
        """Returns, by index into rows, why an output cannot continue. Call it after `masks`."""

    def follow(self, output: StepOutput, rows: np.ndarray) -> None:
        """Gives the tokens of a launched step to the matchers of the sampled rows [R], once these tokens are known."""


class _Unrestricted:
    """Takes no matcher."""

    def fill(self, row: int, matcher: Matcher, num_prompt_tokens: int) -> None:
        raise InvalidStep("a new request has a grammar or a thinking budget, which this runner does not support")

    def clear(self, row: int) -> None:
        pass

    def masks(self, rows: np.ndarray, num_tokens: np.ndarray | None, offsets: np.ndarray | None) -> None:
        return None

    def errors(self, rows: np.ndarray) -> dict[int, str]:
        return {}

    def follow(self, output: StepOutput, rows: np.ndarray) -> None:
        pass


UNRESTRICTED: Constraints = _Unrestricted()

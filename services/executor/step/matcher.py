"""The seam for restricted output: decides which tokens may follow in the output of one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class Matcher(Protocol):
    """The place of one output within its restrictions. One thread at a time may use it."""

    @property
    def error(self) -> str:
        """The reason why the output cannot continue, for the client; "" if it can."""

    @property
    def num_free(self) -> int:
        """Length of the output up to which any token may follow. Constant."""

    @property
    def is_over(self) -> bool:
        """True once any token may follow for the rest of the output."""

    def give_up(self, reason: str) -> None:
        """Makes `reason` the error: the output could continue, but following it takes too long."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advances over these tokens of the output."""

    def fill_mask(self, mask: np.ndarray) -> None:
        """Sets bit t % 32 of mask[t // 32], int32 [ceil(vocab_size / 32)], for each token t that may follow.

        Sets all bits if nothing is known, because the output has ended or there is an error.
        """

    def allows(self, token_id: int) -> bool:
        """Returns whether the output can continue with this token. The mask usually agrees, but not always."""

    def forced(self) -> Sequence[int]:
        """Returns the tokens that must follow, as far as they are found quickly; usually none."""

    def place(self) -> Any:
        """Returns where the output is now, for `go_back`."""

    def go_back(self, place: Any) -> None:
        """Returns to a place: the tokens after it do not belong to the output."""

"""One sum over ranks for layers with outputs that are added, in place of one for each."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pagewire.services.executor.parallel.communicator import ALONE, Communicator


class Summed(Protocol):
    """A layer that may end with a sum over ranks."""

    @property
    def summing_ranks(self) -> Communicator | None:
        """Returns the ranks that each have a part of its output, which it sums; None: its output is whole without
        that."""

    def leave_sum(self) -> None:
        """Makes it return the rank's part of its output from now on."""


class JointSum:
    """A sum of layers with outputs that are added before anything else is done with them. If all of them sum over
    ranks, none does so itself any more: to be called with what they have given, added. Otherwise they stay as they
    are."""

    __slots__ = ("_ranks",)

    def __init__(self, *layers: Summed) -> None:
        found = [layer.summing_ranks for layer in layers]
        self._ranks = ALONE if found[0] is None or None in found else found[0]
        if self._ranks is not ALONE:
            for layer in layers:
                layer.leave_sum()

    def __call__(self, total: Tensor) -> Tensor:
        """total [num_tokens, hidden_size], same shape out; may be overwritten"""
        return self._ranks.all_reduce(total)

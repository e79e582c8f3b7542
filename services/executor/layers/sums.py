"""One sum over ranks, instead of several, for layers with added outputs."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pagewire.services.executor.parallel.communicator import ALONE, Communicator


class Summed(Protocol):
    """A layer that may end with a sum over ranks."""

    @property
    def summing_ranks(self) -> Communicator | None:
        """Returns the ranks between which it sums the parts of its output; None: its output needs no sum."""

    def leave_sum(self) -> None:
        """Makes it return the rank's part of its output from now on."""


class JointSum:
    """The sum over ranks of several layers, of which the outputs are added first. If all of them sum over ranks, they
    leave this sum to this object, which is called with their added outputs. Otherwise the layers stay unchanged."""

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

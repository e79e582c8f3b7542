"""Collectives: exchanges between the ranks of a group within a step.

All ranks make the same calls in the same order: a call returns once the other ranks have made it.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Communicator(Protocol):
    """One rank's access to a group. Every rank receives the same bits: sums are in the order of ranks."""

    rank: int  # from 0
    size: int  # ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' x, of any shape; x may be overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Joins x [n, k] of all ranks to [n, size * k], in the order of ranks."""

    def all_to_all(self, x: Tensor, rows: Tensor, starts: Tensor) -> None:
        """Sends row rows[i] of x [n, k] from rank s to the same row of rank d's x, for i in
        [starts[d * size + s], starts[d * size + s + 1]): int32 [any], int32 [size * size + 1], the same on all ranks.
        """

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        """Returns rank root's x. Other ranks pass a tensor of its shape and dtype, which may be overwritten."""


class _Alone:
    """A group of a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, rows: Tensor, starts: Tensor) -> None:
        pass

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        return x


ALONE: Communicator = _Alone()

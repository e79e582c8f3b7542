"""A layer's parts of a checkpoint's tensors: a rank's share, and rows in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Index: TypeAlias = range | Tensor | None  # along one dimension: neighbours, any (int64), or all


@dataclass(frozen=True)
class StoredPart:
    """The part of a stored tensor that a load target holds, if not the whole tensor as stored."""

    shape: tuple[int, ...]  # of the whole
    index: tuple[Index, ...]  # by dimension; the remaining dimensions are whole

    def rows(self, first: int, count: int) -> tuple[Index, ...]:
        """Returns `index` of the target's rows from `first` on."""
        chosen, *others = self.index
        if chosen is None:
            chosen = range(self.shape[0])
        return (chosen[first : first + count], *others)


@runtime_checkable
class SplitLayer(Protocol):
    """A layer with load targets that may be parts of stored tensors."""

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        """Yields the names and parts of those targets."""


def select(tensor: Tensor, index: Sequence[Index]) -> Tensor:
    """Returns the tensor at `index`, by dimension; a view if all indices are ranges."""
    for dim, chosen in enumerate(index):
        if isinstance(chosen, range):
            tensor = tensor.narrow(dim, chosen.start, len(chosen))
    for dim, chosen in enumerate(index):
        if isinstance(chosen, Tensor):
            chosen = chosen.to(tensor.device)
            if tensor.dtype.itemsize == 1:  # not every torch build can index fp8
                tensor = tensor.view(torch.uint8).index_select(dim, chosen).view(tensor.dtype)
            else:
                tensor = tensor.index_select(dim, chosen)
    return tensor


def rows_of(target: Tensor, first_row: int, part: StoredPart | None) -> Sequence[Index]:
    """Returns the place in a stored tensor of `target`'s rows, which begin at first_row."""
    if part is not None:
        return part.rows(first_row, len(target))
    return (range(first_row, first_row + len(target)),) if target.ndim else ()


def neighbours(chosen: Tensor) -> range | Tensor:
    """Returns the index as a range, if it is one."""
    first, count = int(chosen[0]), len(chosen)
    is_range = int(chosen[-1]) - first == count - 1 and bool((chosen.diff() == 1).all())
    return range(first, first + count) if is_range else chosen


def indices(chosen: range | Tensor) -> Tensor:
    """Returns int64 indices on the host."""
    if isinstance(chosen, Tensor):
        return chosen
    return torch.arange(chosen.start, chosen.stop, device="cpu")

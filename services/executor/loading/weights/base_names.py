"""Tensors of a checkpoint by the names that its model uses, where the checkpoint has them without a head's prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.services.executor.loading.weights import WeightSource

# Names of a norm's tensors in checkpoints that were converted from TensorFlow, and since.
_OLD_ENDS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


def with_base_names(source: WeightSource, base: str) -> WeightSource:
    """The source, with names that begin with `base` if no name does: it was saved from a model without a head."""
    prefix = "" if any(name.startswith(base) for name in source.shapes) else base
    names = {f"{prefix}{_renamed(name)}": name for name in source.shapes}
    return source if all(new == old for new, old in names.items()) else _Renamed(source, names)


def _renamed(name: str) -> str:
    for old, new in _OLD_ENDS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


class _Renamed:
    def __init__(self, source: WeightSource, names: dict[str, str]) -> None:
        """names: what the model calls a tensor -> what the source does."""
        self.shapes = {new: source.shapes[old] for new, old in names.items()}
        self._source = source
        self._names = names

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._names[name])

    def raw(self, name: str) -> Tensor:
        return self._source.raw(self._names[name])

    def raw_dtype(self, name: str) -> torch.dtype:
        return self._source.raw_dtype(self._names[name])

    def stored_bytes(self, name: str) -> int:
        return self._source.stored_bytes(self._names[name])

    def read_into(self, name: str, target: Tensor, first_row: int = 0, order: Tensor | None = None) -> None:
        self._source.read_into(self._names[name], target, first_row, order)

"""Tensors under a model's names; tensors with the weights of all experts are divided."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.parts import Index, StoredPart, rows_of, select
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.models.architecture import Interleaved


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor, or of its element `expert`."""

    stored: str
    expert: int | None
    rows: slice
    transposed: bool

    @property
    def index(self) -> Sequence[Index]:
        """Returns the index to read of the stored tensor."""
        return () if self.expert is None else (range(self.expert, self.expert + 1),)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the wanted part. tensor: the stored one at `index`."""
        whole = tensor if self.expert is None else tensor[0]
        return (whole.T if self.transposed else whole)[self.rows]


class AliasedSource:
    """A source with tensors that also go by other names."""

    def __init__(self, source: WeightSource, aliases: Mapping[str, tuple[str, ...] | Interleaved]) -> None:
        """aliases: see `Architecture.aliases`."""
        self._source = source
        self._parts: dict[str, _Part] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for stored, shape in source.shapes.items():
            end = next((end for end in aliases if stored.endswith(f".{end}")), None)
            if end is None:
                self.shapes[stored] = shape
                continue
            prefix = stored.removesuffix(end)
            for name, part, part_shape in _parts(stored, shape, prefix, aliases[end]):
                self._parts[name], self.shapes[name] = part, part_shape

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._stored(name))

    def raw(self, name: str, index: Sequence[Index] = (), view: Sequence[int] | None = None) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return self._source.raw(name, index, view)
        tensor = part.of(self._source.raw(part.stored, part.index))
        return select(tensor if view is None else tensor.reshape(*view), index)

    def raw_dtype(self, name: str) -> torch.dtype:
        return self._source.raw_dtype(self._stored(name))

    def stored_bytes(self, name: str) -> int:
        part = self._parts.get(name)
        if part is None:
            return self._source.stored_bytes(name)
        whole, own = math.prod(self._source.shapes[part.stored]), math.prod(self.shapes[name])
        return self._source.stored_bytes(part.stored) * own // whole

    def read_into(self, name: str, target: Tensor, first_row: int = 0, part: StoredPart | None = None) -> None:
        if name not in self._parts:
            self._source.read_into(name, target, first_row, part)
            return
        self.dtype(name)
        target.copy_(self.raw(name, rows_of(target, first_row, part)))

    def _stored(self, name: str) -> str:
        return self._parts[name].stored if name in self._parts else name


def _parts(
    stored: str, shape: tuple[int, ...], prefix: str, alias: tuple[str, ...] | Interleaved
) -> Iterator[tuple[str, _Part, tuple[int, ...]]]:
    """alias: of equal shares of its rows, with {} for the expert where it has all experts'."""
    names, transposed = (alias.names, alias.transposed) if isinstance(alias, Interleaved) else (alias, False)
    of_experts = "{}" in names[0]
    dims = shape[1:] if of_experts else shape
    dims = dims[::-1] if transposed else dims
    if not dims or dims[0] % len(names) or (transposed and len(dims) != 2):
        raise ModelLoadError(
            f"tensor {stored}: shape {list(shape)} is not that of {len(names)} weights for each expert"
        )
    size = dims[0] // len(names)
    for expert in range(shape[0]) if of_experts else (None,):
        for i, name in enumerate(names):
            rows = slice(i, None, len(names)) if isinstance(alias, Interleaved) else slice(i * size, (i + 1) * size)
            yield (prefix + name).format(expert), _Part(stored, expert, rows, transposed), (size, *dims[1:])

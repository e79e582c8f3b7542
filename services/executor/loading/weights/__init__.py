"""Sources of weights. Every source names its tensors as Hugging Face does and writes them into given memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pagewire.services.executor.layers.parts import Index, StoredPart


class WeightSource(Protocol):
    """Tensors of one checkpoint, in their order on disk; methods may be called from several threads."""

    shapes: dict[str, tuple[int, ...]]  # tensor name -> shape, known without reading the data

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype that the tensor is read as, before conversion. Raises ModelLoadError if it is no
        weight."""

    def raw(self, name: str, index: Sequence[Index] = (), view: Sequence[int] | None = None) -> Tensor:
        """The tensor as stored; of a GGUF file its blocks, uint8 [rows, bytes per row], rows in the model's order.

        index: of its dimensions, what is read. view: the shape to take it for first.
        """

    def raw_dtype(self, name: str) -> torch.dtype: ...

    def stored_bytes(self, name: str) -> int: ...

    def read_into(self, name: str, target: Tensor, first_row: int = 0, part: StoredPart | None = None) -> None:
        """Writes as many rows of the tensor as `target` (host memory) has, converted to target's dtype.

        part: what of the tensor is read; first_row is one of its rows.
        """

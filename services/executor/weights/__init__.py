"""Where weights come from. Every source names its tensors as Hugging Face does and writes them into given memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Tensors of one checkpoint, read one at a time; `read_into` may be called from several threads."""

    shapes: dict[str, tuple[int, ...]]  # tensor name -> shape, known without reading the data

    def read_into(self, name: str, target: Tensor) -> None:
        """Writes the tensor into `target` (same shape), converted to its dtype and device."""

"""Weights from `pytorch_model.bin`: only tensors are read, anything else in the file is refused."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagewire.files.damaged_file import remedy
from pagewire.services.executor.config.load_error import ModelLoadError
from pagewire.services.executor.layers.parts import Index, StoredPart, rows_of, select


class TorchFileSource:
    """A `WeightSource`, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError."""
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise ModelLoadError(
                f"{path}: truncated, or not a file of tensors alone ({str(error).splitlines()[0]}); {remedy(path)}"
            ) from error
        if not isinstance(loaded, Mapping) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
            raise ModelLoadError(f"{path}: holds something else than tensors by name; {remedy(path)}")
        self._tensors: dict[str, Tensor] = dict(loaded)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def rename(self, names: Mapping[str, str]) -> None:
        """Yields tensors as `SafetensorsSource` does."""
        self._tensors = {names[name]: tensor for name, tensor in self._tensors.items()}
        self.shapes = {names[name]: shape for name, shape in self.shapes.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    raw_dtype = dtype

    def raw(self, name: str, index: Sequence[Index] = (), view: Sequence[int] | None = None) -> Tensor:
        tensor = self._tensors[name]
        return select(tensor if view is None else tensor.view(*view), index)

    def stored_bytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def read_into(self, name: str, target: Tensor, first_row: int = 0, part: StoredPart | None = None) -> None:
        target.copy_(self.raw(name, rows_of(target, first_row, part)))

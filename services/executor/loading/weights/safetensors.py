"""Weights from safetensors files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.files.damaged_file import remedy
from pagewire.services.executor.config.load_error import ModelLoadError
from pagewire.services.executor.layers.parts import Index, StoredPart, rows_of, select
from pagewire.services.executor.loading.weights.checkpoint_files import checkpoint_files

_FLOAT_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPES = _FLOAT_TYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}


class SafetensorsSource:
    """Memory-mapped: a tensor's pages are read from disk when it is copied into the model."""

    def __init__(self, directory: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._paths: dict[str, Path] = {}
        self._types: dict[str, str] = {}  # tensor name -> safetensors' name of its type
        self._stored_names: dict[str, str] = {}  # tensor name -> that in the file
        for path in checkpoint_files(directory):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt", device="cpu")
            for name in file.offset_keys():
                stored = file.get_slice(name)
                if name in self.shapes:
                    raise ModelLoadError(f"{path}: tensor {name} is also in {self._paths[name].name}")
                self.shapes[name] = tuple(stored.get_shape())
                self._types[name] = stored.get_dtype()
                self._stored_names[name] = name
                self._files[name] = file
                self._paths[name] = path
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: truncated or not a safetensors file ({error}); {remedy(path)}") from error

    def rename(self, names: Mapping[str, str]) -> None:
        """Every tensor goes by another name from now on (old -> new, of all)."""
        self.shapes = {names[name]: shape for name, shape in self.shapes.items()}
        self._files = {names[name]: file for name, file in self._files.items()}
        self._paths = {names[name]: path for name, path in self._paths.items()}
        self._types = {names[name]: kind for name, kind in self._types.items()}
        self._stored_names = {names[name]: stored for name, stored in self._stored_names.items()}

    def dtype(self, name: str) -> torch.dtype:
        if (dtype := _FLOAT_TYPES.get(self._types[name])) is None:
            raise ModelLoadError(
                f"{self._paths[name]}: tensor {name} has type {self._types[name]}, expected {', '.join(_FLOAT_TYPES)}; "
                "a quantized weight must have its scales, and be named in quantization_config"
            )
        return dtype

    def raw(self, name: str, index: Sequence[Index] = (), view: Sequence[int] | None = None) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(self._stored_names[name])  # a view of the mapped file
        except SafetensorError as error:
            raise ModelLoadError(f"{self._paths[name]}: cannot read tensor {name} ({error})") from error
        return select(tensor if view is None else tensor.view(*view), index)

    def raw_dtype(self, name: str) -> torch.dtype:
        if (dtype := _TYPES.get(self._types[name])) is None:
            raise ModelLoadError(
                f"{self._paths[name]}: tensor {name} has type {self._types[name]}, expected one of {', '.join(_TYPES)}"
            )
        return dtype

    def stored_bytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.raw_dtype(name).itemsize

    def read_into(self, name: str, target: Tensor, first_row: int = 0, part: StoredPart | None = None) -> None:
        self.dtype(name)
        target.copy_(self.raw(name, rows_of(target, first_row, part)))

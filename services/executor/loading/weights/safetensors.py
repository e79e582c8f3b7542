"""Weights from `model.safetensors`, or from the shards that `model.safetensors.index.json` lists."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire.services.executor.model_config import ModelLoadError

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
                self._files[name] = file
                self._paths[name] = path
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: truncated or not a safetensors file ({error}); download it again") from error

    def dtype(self, name: str) -> torch.dtype:
        if (dtype := _FLOAT_TYPES.get(self._types[name])) is None:
            raise ModelLoadError(
                f"{self._paths[name]}: tensor {name} has type {self._types[name]}, expected {', '.join(_FLOAT_TYPES)}; "
                "a quantized weight must have its scales, and be named in quantization_config"
            )
        return dtype

    def raw(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._files[name].get_tensor(name)  # a view of the mapped file
        except SafetensorError as error:
            raise ModelLoadError(f"{self._paths[name]}: cannot read tensor {name} ({error})") from error
        return tensor

    def raw_dtype(self, name: str) -> torch.dtype:
        if (dtype := _TYPES.get(self._types[name])) is None:
            raise ModelLoadError(
                f"{self._paths[name]}: tensor {name} has type {self._types[name]}, expected one of {', '.join(_TYPES)}"
            )
        return dtype

    def stored_bytes(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.raw_dtype(name).itemsize

    def read_into(self, name: str, target: Tensor, first_row: int = 0) -> None:
        self.dtype(name)
        tensor = self.raw(name)
        target.copy_(tensor.narrow(0, first_row, len(target)) if target.ndim else tensor)


def checkpoint_files(directory: Path) -> list[Path]:
    """The directory's safetensors files. Raises ModelLoadError when there are none or a shard is missing."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelLoadError(
            f"{directory}: neither model.safetensors nor model.safetensors.index.json is there; other weight files "
            "(.bin, .pth) are not supported, convert them to safetensors"
        )
    names = _shards(index)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"{directory}: shards named in {index.name} are missing: {', '.join(missing)}")
    return [directory / name for name in names]


def _shards(index: Path) -> list[str]:
    """Names of files beside the index."""
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{index}: not a valid index of safetensors shards ({error!r})") from error
    for name in names:
        if not isinstance(name, str) or name != Path(name).name:
            raise ModelLoadError(f"{index}: weight_map names {name!r:.200}, expected a file in the same folder")
    return names

"""Weights from `model.safetensors`, or from the shards that `model.safetensors.index.json` lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.executor.model_config import ModelLoadError

_FLOAT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class SafetensorsSource:
    """Memory-mapped: a tensor's pages are read from disk when it is copied into the model."""

    def __init__(self, directory: Path) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._paths: dict[str, Path] = {}
        for path in checkpoint_files(directory):
            self._open(path)

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._files[name] = file
                self._paths[name] = path
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: truncated or not a safetensors file ({error}); download it again") from error

    def read_into(self, name: str, target: Tensor) -> None:
        try:
            tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ModelLoadError(f"{self._paths[name]}: cannot read tensor {name} ({error})") from error
        if tensor.dtype not in _FLOAT_TYPES:
            raise ModelLoadError(
                f"{self._paths[name]}: tensor {name} has type {tensor.dtype}, expected fp64, fp32, fp16 or bf16; "
                "quantized checkpoints are not supported"
            )
        target.copy_(tensor)


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
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
        raise ModelLoadError(f"{index}: not a valid index of safetensors shards ({error!r})") from error
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ModelLoadError(f"{directory}: shards named in {index.name} are missing: {', '.join(missing)}")
    return [directory / name for name in names]

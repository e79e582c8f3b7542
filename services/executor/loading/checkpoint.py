"""A model on disk before it is loaded: a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from pagewire.services.executor.layers.weight_format import Quantization
from pagewire.services.executor.loading.quantization.gguf import GgufQuantization
from pagewire.services.executor.loading.quantization.registry import FORMATS, is_left_over, quantization_of
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.gguf import (
    GgufSource,
    gguf_architecture,
    gguf_config,
    gguf_eos_token_ids,
    named_tensors,
)
from pagewire.services.executor.loading.weights.gguf_file import GgufFile
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.model_config import ModelConfig, ModelLoadError, token_ids
from pagewire.services.executor.models.registry import ARCHITECTURES


class DirectoryCheckpoint:
    """`config.json`, optionally `generation_config.json`, and safetensors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = read_json(path / "config.json")
        architectures = self._raw.get("architectures") or []
        if len(architectures) != 1:
            raise ModelLoadError(f"{path}/config.json: key architectures must name one class, found {architectures}")
        self.architecture: str = architectures[0]
        name = self._raw.get("dtype") or self._raw.get("torch_dtype")
        self.dtype: torch.dtype | None = None
        if name is not None:
            self.dtype = getattr(torch, str(name), None)
            if not isinstance(self.dtype, torch.dtype):
                raise ModelLoadError(f"{path}/config.json: key dtype: {name!r} is not a torch dtype")

    def config(self, dtype: torch.dtype) -> ModelConfig:
        """Only for our own architectures; `generation_config.json` wins over `config.json` for the stop tokens."""
        try:
            config = ARCHITECTURES[self.architecture].read_config(self._raw, dtype)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.path}/config.json: {error}") from error
        return dataclasses.replace(config, eos_token_ids=self.eos_token_ids(config.eos_token_ids))

    def eos_token_ids(self, default: tuple[int, ...]) -> tuple[int, ...]:
        path = self.path / "generation_config.json"
        return (token_ids(read_json(path).get("eos_token_id")) if path.is_file() else ()) or default

    def weights(self) -> WeightSource:
        return SafetensorsSource(self.path)

    def quantization(self, weights: WeightSource | None, requested: str | None) -> Quantization | None:
        """weights: None if they are random. requested: by `--quantization`."""
        file, config = "config.json", self._raw.get("quantization_config")
        for stored in FORMATS.values():
            name = stored.config_file
            if config is None and name is not None and (self.path / name).is_file():
                file, config = name, {"quant_method": stored.name} | read_json(self.path / name)
        if config is None:
            return None
        try:
            found = quantization_of(config, None if weights is None else weights.shapes)
            return None if weights is not None and is_left_over(config, weights.shapes, requested) else found
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.path}/{file}: {error}") from error


class GgufCheckpoint:
    """One `.gguf` file with metadata, tokenizer and weights."""

    dtype = None  # the weights are quantized: there is no dtype to keep

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self.architecture = gguf_architecture(self._file)

    def config(self, dtype: torch.dtype) -> ModelConfig:
        """Only for our own architectures."""
        return gguf_config(self._file, dtype)

    def eos_token_ids(self, default: tuple[int, ...]) -> tuple[int, ...]:
        return gguf_eos_token_ids(self._file) or default

    def weights(self) -> WeightSource:
        return GgufSource(self._file)

    def quantization(self, weights: WeightSource | None, requested: str | None) -> Quantization | None:
        return GgufQuantization({name: tensor.type for name, tensor in named_tensors(self._file).items()})


Checkpoint = DirectoryCheckpoint | GgufCheckpoint


def open_checkpoint(path: Path, load_format: str) -> Checkpoint:
    """Raises ModelLoadError when `path` is not a model, or not one of the format asked for."""
    if path.is_dir():
        if load_format == "gguf" or not (path / "config.json").is_file():
            return GgufCheckpoint(_only_gguf_file(path))
        return DirectoryCheckpoint(path)
    if not path.is_file():
        raise ModelLoadError(f"{path}: no such model directory or .gguf file")
    if path.suffix != ".gguf" or load_format == "safetensors":
        raise ModelLoadError(f"{path}: --load-format {load_format} needs a directory with config.json, or a .gguf file")
    return GgufCheckpoint(path)


def _only_gguf_file(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    if len(files) != 1:
        raise ModelLoadError(
            f"{directory}: neither config.json nor a single .gguf file is there (found {len(files)} .gguf files); "
            "name the file itself"
        )
    return files[0]


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object")
    return value

"""A model on disk before it is loaded: a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pagewire.config.model_refusals import FORMAT_FILES
from pagewire.config.values import executor as values
from pagewire.files.model_files import gguf_splits
from pagewire.files.tokenizer_files.end_tokens import directory_eos_token_id
from pagewire.services.executor.config.model_config import ModelConfig, ModelLoadError, token_ids
from pagewire.services.executor.layers.weight_format import Quantization
from pagewire.services.executor.loading.config_file import architecture_of, dtype_of, overridden, read_json, text_keys
from pagewire.services.executor.loading.quantization.registry import is_left_over, quantization_of
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.aliases import AliasedSource
from pagewire.services.executor.loading.weights.prefix import renamed
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    from pagewire.services.executor.loading.gguf_checkpoint import GgufCheckpoint


class DirectoryCheckpoint:
    """`config.json`, optionally `generation_config.json`, and safetensors.

    overrides: replace keys of `config.json`.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.overrides = overrides or {}
        self.keys = overridden(read_json(path / "config.json"), self.overrides)
        try:
            self.architecture = architecture_of(self.keys)
            self.dtype = dtype_of(text_keys(self.keys))
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}/config.json: {error}") from error

    def config(self, dtype: torch.dtype) -> ModelConfig:
        """Returns the config of one of our own architectures; for the end tokens, `generation_config.json` precedes
        `config.json`, and that of the tokenizer counts as well."""
        own = ARCHITECTURES[self.architecture]
        keys = {**(self.keys if own.has_parts else text_keys(self.keys)), "architectures": [self.architecture]}
        try:
            config: ModelConfig = own.read_config(keys, dtype)
            return dataclasses.replace(config, eos_token_ids=self.eos_token_ids(config.eos_token_ids))
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.path}/config.json: {error}") from error

    def eos_token_ids(self, default: tuple[int, ...]) -> tuple[int, ...]:
        path = self.path / "generation_config.json"
        named = (token_ids(read_json(path).get("eos_token_id")) if path.is_file() else ()) or default
        try:
            own = directory_eos_token_id(self.path)
        except ValueError as error:
            raise ModelLoadError(str(error)) from error
        return named if own is None else tuple(dict.fromkeys((*named, own)))

    def weights(self) -> WeightSource:
        source = SafetensorsSource(self.path)
        own = ARCHITECTURES.get(self.architecture)
        if own is None:
            return source
        source.rename(renamed(source.shapes, own.prefixes, own.base))
        if not own.aliases:
            return source
        try:
            return AliasedSource(source, own.aliases)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.path}: {error}") from error

    def quantization(self, weights: WeightSource | None, requested: str | None) -> Quantization | None:
        """Returns the quantization. weights: None if they are random. requested: by `--quantization`."""
        file, config = "config.json", self.keys.get("quantization_config")
        for method, name in FORMAT_FILES.items():
            if config is None and (self.path / name).is_file():
                file, config = name, {"quant_method": method} | read_json(self.path / name)
        if config is None:
            return None
        try:
            found = quantization_of(config, None if weights is None else weights.shapes)
            return None if weights is not None and is_left_over(config, weights.shapes, requested) else found
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.path}/{file}: {error}") from error


Checkpoint: TypeAlias = "DirectoryCheckpoint | GgufCheckpoint"


def open_checkpoint(path: Path, load_format: str, overrides: Mapping[str, Any] | None = None) -> Checkpoint:
    """Raises ModelLoadError when `path` is not a model, or not one of the format asked for.

    overrides: see `DirectoryCheckpoint`.
    """
    if path.is_dir() and load_format != "gguf" and (path / "config.json").is_file():
        return DirectoryCheckpoint(path, overrides)
    if path.is_dir():
        path = _only_gguf_file(path)
    elif not path.is_file():
        raise ModelLoadError(f"{path}: no such model directory or .gguf file")
    if path.suffix != ".gguf" or load_format == "safetensors":
        raise ModelLoadError(values.of_load_format(path, load_format))
    if overrides:
        raise ModelLoadError(values.of_overrides(path))
    # Imports `gguf`, which only these files need.
    from pagewire.services.executor.loading.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)


def _only_gguf_file(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    if not files or files != gguf_splits(files[0]):
        raise ModelLoadError(
            f"{directory}: neither config.json nor a single .gguf file is there (found {len(files)} .gguf files); "
            "name the file itself"
        )
    return files[0]

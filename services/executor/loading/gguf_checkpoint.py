"""One `.gguf` file before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pagewire.services.executor.config.model_config import ModelConfig
from pagewire.services.executor.layers.weight_format import Quantization
from pagewire.services.executor.loading.quantization.gguf import GgufQuantization
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.loading.weights.gguf import GgufSource
from pagewire.services.executor.loading.weights.gguf_config import gguf_architecture, gguf_config, gguf_eos_token_ids
from pagewire.services.executor.loading.weights.gguf_file import GgufFile
from pagewire.services.executor.loading.weights.gguf_names import named_tensors


class GgufCheckpoint:
    """Metadata, tokenizer and weights."""

    dtype = None  # the weights are quantized: there is no dtype to keep
    overrides: Mapping[str, Any] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self.architecture = gguf_architecture(self._file)

    def config(self, dtype: torch.dtype) -> ModelConfig:
        """Returns the config, only of our own architectures."""
        return gguf_config(self._file, dtype)

    def eos_token_ids(self, default: tuple[int, ...]) -> tuple[int, ...]:
        return gguf_eos_token_ids(self._file) or default

    def weights(self) -> WeightSource:
        return GgufSource(self._file)

    def quantization(self, weights: WeightSource | None, requested: str | None) -> Quantization | None:
        return GgufQuantization({name: tensor.type for name, tensor in named_tensors(self._file).items()})

"""Ministral: Mistral with a window in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config, layer_windows
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.dense.llama import mistral_config


def ministral_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    """Reads the config. Without `layer_types` the window applies to all layers."""
    if not raw.get("layer_types"):
        return mistral_config(raw, dtype)
    return decoder_config(raw, dtype, sliding_windows=layer_windows({**raw, "use_sliding_window": True}))


ARCHITECTURES = (Architecture("MinistralForCausalLM", "ministral", ministral_config, DecoderModel),)

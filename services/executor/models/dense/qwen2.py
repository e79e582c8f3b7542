"""Qwen2 and Qwen2.5: biased q, k and v projections, sliding window from a given layer on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config, layer_windows
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderModel


def qwen2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    return decoder_config(raw, dtype, qkv_bias=True, sliding_windows=layer_windows(raw))


ARCHITECTURES = (
    Architecture("Qwen2ForCausalLM", "qwen2", qwen2_config, DecoderModel, GgufForm("qwen2"), quantizable=True),
)

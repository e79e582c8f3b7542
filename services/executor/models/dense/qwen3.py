"""Qwen3: q and k are normalised per head, and head_dim is independent of hidden_size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config, layer_windows, optional
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderModel


def qwen3_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    attention_bias = raw.get("attention_bias", False)
    return decoder_config(
        raw,
        dtype,
        head_dim=optional(raw, "head_dim", 128),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        qk_norm=True,
        sliding_windows=layer_windows(raw),
    )


ARCHITECTURES = (
    Architecture("Qwen3ForCausalLM", "qwen3", qwen3_config, DecoderModel, GgufForm("qwen3"), quantizable=True),
)

"""Llama and models with the same weights: SmolLM2, and Mistral with its sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config, required, sliding_window
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderModel


def llama_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    attention_bias = raw.get("attention_bias", False)
    return decoder_config(
        raw,
        dtype,
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=raw.get("mlp_bias", False),
    )


def mistral_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    """Returns one window for all layers; null, as in Mistral 7B from version 0.2 on, means none, a missing key 4096."""
    num_layers = required(raw, "num_hidden_layers")
    return decoder_config(raw, dtype, sliding_windows=(sliding_window(raw, 4096),) * num_layers)


# In older files it is called llama as well. Ministral 3, which scales scores by position, is not implemented.
_MISTRAL_GGUF = GgufForm(
    "mistral3", interleaved_rotary=True, when=lambda stated: "attention.temperature_scale" not in stated
)

ARCHITECTURES = (
    Architecture(
        "LlamaForCausalLM",
        "llama",
        llama_config,
        DecoderModel,
        GgufForm("llama", interleaved_rotary=True, when=lambda stated: not stated.get("expert_count")),
        quantizable=True,
    ),
    Architecture("MistralForCausalLM", "mistral", mistral_config, DecoderModel, _MISTRAL_GGUF, quantizable=True),
)

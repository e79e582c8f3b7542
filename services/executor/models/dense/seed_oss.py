"""Seed-OSS: Llama with biases of queries, keys and values, and an independent head size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config, optional
from pagewire.services.executor.models.architecture import DECODER_NAMES, Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderModel


def seed_oss_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    return decoder_config(
        raw,
        dtype,
        head_dim=optional(raw, "head_dim", 128),
        qkv_bias=raw.get("attention_bias", True),
        attention_output_bias=raw.get("attention_out_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
    )


_GGUF = GgufForm("seed_oss", names={**DECODER_NAMES, "post_attention_norm": "post_attention_layernorm"})

ARCHITECTURES = (Architecture("SeedOssForCausalLM", "seed_oss", seed_oss_config, DecoderModel, _GGUF),)

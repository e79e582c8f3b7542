"""Granite 3: Llama with constant factors of embeddings, scores, the halves of a layer and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import DecoderConfig, positive_number
from pagewire.services.executor.layers.attention.self_attention import SelfAttention, llama_attention
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderLayer, DecoderModel
from pagewire.services.executor.models.dense.llama import llama_config
from pagewire.services.executor.step.step_context import StepContext


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """`rms_norm_eps` and `embedding_scale` are for a stream that is divided by `residual_multiplier`."""

    embedding_scale: float
    attention_scale: float
    logits_divisor: float


def granite_config(raw: Mapping[str, Any], dtype: torch.dtype) -> GraniteConfig:
    """Each half of a layer adds `residual_multiplier * output` to the stream.

    The norms divide by the stream's size, so a stream that is `residual_multiplier` times smaller needs no product:
    its embeddings are divided by the multiplier, and eps by the multiplier's square.
    """
    decoder = vars(llama_config(raw, dtype))
    residual = positive_number(raw, "residual_multiplier", 1.0)
    return GraniteConfig(
        **decoder | {"rms_norm_eps": decoder["rms_norm_eps"] / residual**2},
        embedding_scale=positive_number(raw, "embedding_multiplier", 1.0) / residual,
        attention_scale=positive_number(raw, "attention_multiplier", 1.0),
        logits_divisor=positive_number(raw, "logits_scaling", 1.0),
    )


class GraniteLayer(DecoderLayer):
    __slots__ = ()

    def self_attention(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> SelfAttention:
        assert isinstance(config, GraniteConfig)
        return llama_attention(config, layer_idx, rotary, placement, scale=config.attention_scale)


class GraniteModel(DecoderModel):
    layer = GraniteLayer
    config: GraniteConfig

    def embedded(self, input_ids: Tensor, context: StepContext) -> Tensor:
        return self.embed(input_ids).mul_(self.config.embedding_scale)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden).div_(self.config.logits_divisor)


_GGUF = GgufForm(
    "granite",
    interleaved_rotary=True,
    numbers={
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "logit_scale": "logits_scaling",
        "residual_scale": "residual_multiplier",
    },
)

ARCHITECTURES = (Architecture("GraniteForCausalLM", "granite", granite_config, GraniteModel, _GGUF),)

"""OLMoE: experts in place of each feed-forward block, and OLMo 2's attention of normalised input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, ModelLoadError, optional
from pagewire.services.executor.layers.experts.experts import ExpertsConfig, RoutedMLP
from pagewire.services.executor.layers.experts.routing import Routing
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.architecture import (
    DECODER_NAMES,
    EXPERTS_ALIASES,
    EXPERTS_NAMES,
    Architecture,
    GgufForm,
)
from pagewire.services.executor.models.causal import PreNormLayer
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.dense.llama import llama_config
from pagewire.services.executor.models.dense.olmo2 import Olmo2Attention


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(DecoderConfig):
    experts: ExpertsConfig


def olmoe_config(raw: Mapping[str, Any], dtype: torch.dtype) -> OlmoeConfig:
    if raw.get("clip_qkv") is not None:
        raise ModelLoadError(
            f"config key clip_qkv: {raw['clip_qkv']} is not supported, expected null; use --model-impl transformers"
        )
    decoder = llama_config({"rms_norm_eps": 1e-5, **raw}, dtype)
    experts = ExpertsConfig(
        num_experts=optional(raw, "num_experts", 64),
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        routing=Routing(top_k=optional(raw, "num_experts_per_tok", 8), normalize=raw.get("norm_topk_prob", False)),
        activation=decoder.hidden_act,
    )
    return OlmoeConfig(**vars(decoder), experts=experts)


class OlmoeLayer(PreNormLayer):
    __slots__ = ()

    def __init__(
        self, config: OlmoeConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            RMSNorm("input_layernorm", size, eps, placement),
            Olmo2Attention(config, layer_idx, rotary, placement.within("self_attn")),
            RMSNorm("post_attention_layernorm", size, eps, placement),
            RoutedMLP(config.experts, placement.within("mlp")),
        )


class OlmoeModel(DecoderModel):
    layer = OlmoeLayer


ARCHITECTURES = (
    Architecture(
        "OlmoeForCausalLM",
        "olmoe",
        olmoe_config,
        OlmoeModel,
        GgufForm("olmoe", names=DECODER_NAMES | EXPERTS_NAMES),
        aliases=EXPERTS_ALIASES,
    ),
)

"""Mixtral: Mistral with eight experts in place of each feed-forward block, two of them per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.config.model_config import (
    DecoderConfig,
    decoder_config,
    optional,
    required,
    sliding_window,
)
from pagewire.services.executor.layers.experts.experts import ExpertsConfig, RoutedMLP
from pagewire.services.executor.layers.experts.routing import Routing
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import DECODER_NAMES, Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderLayer, DecoderModel


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(DecoderConfig):
    experts: ExpertsConfig


def mixtral_config(raw: Mapping[str, Any], dtype: torch.dtype) -> MixtralConfig:
    windows = (sliding_window(raw),) * required(raw, "num_hidden_layers")
    decoder = decoder_config(raw, dtype, sliding_windows=windows)
    experts = ExpertsConfig(
        num_experts=optional(raw, "num_local_experts", 8),
        hidden_size=decoder.hidden_size,
        intermediate_size=decoder.intermediate_size,
        routing=Routing(top_k=optional(raw, "num_experts_per_tok", 2), normalize=True),
        activation=decoder.hidden_act,
        gate_up=("w1", "w3"),
        down="w2",
    )
    return MixtralConfig(**vars(decoder), experts=experts)


class MixtralLayer(DecoderLayer):
    def feed_forward(self, config: DecoderConfig, layer_idx: int, placement: Placement) -> RoutedMLP:
        assert isinstance(config, MixtralConfig)
        return RoutedMLP(config.experts, placement.within("block_sparse_moe"))


class MixtralModel(DecoderModel):
    layer = MixtralLayer


_GGUF_NAMES = {
    **DECODER_NAMES,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}

_GGUF = GgufForm(
    "llama", interleaved_rotary=True, names=_GGUF_NAMES, when=lambda stated: bool(stated.get("expert_count"))
)

# As transformers holds them, and saves them with save_original_format=False
_ALIASES = {
    "mlp.gate.weight": ("block_sparse_moe.gate.weight",),
    "mlp.experts.gate_up_proj": ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    "mlp.experts.down_proj": ("block_sparse_moe.experts.{}.w2.weight",),
}

ARCHITECTURES = (
    Architecture(
        "MixtralForCausalLM",
        "mixtral",
        mixtral_config,
        MixtralModel,
        _GGUF,
        aliases=_ALIASES,
    ),
)

"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections; LongRoPE, and in Phi-4-mini a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config, required, sliding_window
from pagewire.services.executor.layers.attention.heads import heads_of
from pagewire.services.executor.layers.attention.self_attention import SelfAttention, head_attention
from pagewire.services.executor.layers.linear import Linear, Split
from pagewire.services.executor.layers.mlp import MLP, gated_activation
from pagewire.services.executor.layers.parts import indices
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.layers.shares import even_share
from pagewire.services.executor.models.architecture import DECODER_NAMES, Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderLayer, DecoderModel, FeedForward


def phi3_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    num_layers = required(raw, "num_hidden_layers")
    window = sliding_window(raw)
    # A window as long as the context has no effect.
    if window >= required(raw, "max_position_embeddings"):
        window = 0
    return decoder_config(raw, dtype, sliding_windows=(window,) * num_layers)


class Phi3Layer(DecoderLayer):
    __slots__ = ()

    def self_attention(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> SelfAttention:
        out_size, heads = config.num_heads * config.head_dim, heads_of(config, placement)
        qkv_size = out_size + 2 * config.num_kv_heads * config.head_dim
        return SelfAttention(
            Linear(config.hidden_size, {"qkv_proj": qkv_size}, placement, bias=False, rows={"qkv_proj": heads.rows()}),
            head_attention(config, layer_idx, rotary, heads),
            Linear(out_size, {"o_proj": config.hidden_size}, placement, bias=False, split=Split.INPUTS),
        )

    def feed_forward(self, config: DecoderConfig, layer_idx: int, placement: Placement) -> FeedForward:
        return fused_gated_mlp(config, placement.within("mlp"))


def fused_gated_mlp(config: DecoderConfig, placement: Placement) -> MLP:
    """Returns a gated feed-forward block; its gates are the first half of one projection."""
    size, rows = config.intermediate_size, None
    if placement.tensor.size > 1:
        gates = indices(even_share("intermediate_size", size, placement.tensor))
        rows = torch.cat((gates, size + gates))
    return MLP(
        Linear(config.hidden_size, {"gate_up_proj": 2 * size}, placement, bias=False, rows={"gate_up_proj": rows}),
        gated_activation(config.hidden_act),
        Linear(size, {"down_proj": config.hidden_size}, placement, bias=False, split=Split.INPUTS),
    )


class Phi3Model(DecoderModel):
    layer = Phi3Layer


# llama.cpp's names for fused projections
FUSED_NAMES = {**DECODER_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

ARCHITECTURES = (Architecture("Phi3ForCausalLM", "phi3", phi3_config, Phi3Model, GgufForm("phi3", names=FUSED_NAMES)),)

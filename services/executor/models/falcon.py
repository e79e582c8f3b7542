"""Falcon: one KV head, or in the new architecture several; attention and feed-forward side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.model_config import ModelLoadError, optional, required
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.causal import Layer, ParallelLayer, PreNormLayer
from pagewire.services.executor.models.gpt_neox import fused_attention
from pagewire.services.executor.models.layer_norm_model import LayerNormConfig, LayerNormModel, layer_norm_values


@dataclass(frozen=True, kw_only=True)
class FalconConfig(LayerNormConfig):
    parallel: bool  # attention and feed-forward
    two_norms: bool  # one for each of them, where they are parallel


def falcon_config(raw: Mapping[str, Any], dtype: torch.dtype) -> FalconConfig:
    if raw.get("alibi"):
        raise ModelLoadError(
            "config key alibi: attention with linear biases is not implemented; use a Falcon with rotary positions"
        )
    is_new = raw.get("new_decoder_architecture", False)
    num_heads, bias = required(raw, "num_attention_heads"), raw.get("bias", False)
    multi_query = raw.get("multi_query", True) and not is_new
    values = layer_norm_values(
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
            **raw,
            "intermediate_size": optional(raw, "ffn_hidden_size", 4 * required(raw, "hidden_size")),
            "hidden_act": raw.get("activation", "gelu"),
        },
        dtype,
        eps="layer_norm_epsilon",
        num_kv_heads=1 if multi_query else optional(raw, "num_kv_heads", num_heads),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
    )
    return FalconConfig(
        **values,
        parallel=is_new or raw.get("parallel_attn", True),
        two_norms=is_new and optional(raw, "num_ln_in_parallel_attn", 2) == 2,
    )


class FalconModel(LayerNormModel):
    body_name = "transformer"
    embed_name = "word_embeddings"
    layers_name = "h"
    norm_name = "ln_f"
    config: FalconConfig

    def layer(self, layer_idx: int, placement: Placement) -> Layer:
        attention = fused_attention(self.config, layer_idx, self.rotary, placement.within("self_attention"))
        mlp = self.plain_mlp("dense_h_to_4h", "dense_4h_to_h", placement.within("mlp"))
        if self.config.two_norms:
            return ParallelLayer(
                self.layer_norm("ln_attn", placement), attention, mlp, self.layer_norm("ln_mlp", placement)
            )
        input_norm = self.layer_norm("input_layernorm", placement)
        if self.config.parallel:
            return ParallelLayer(input_norm, attention, mlp)
        return PreNormLayer(input_norm, attention, self.layer_norm("post_attention_layernorm", placement), mlp)


ARCHITECTURES = (Architecture("FalconForCausalLM", "falcon", falcon_config, FalconModel),)

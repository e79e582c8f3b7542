"""Falcon: one KV head, or several in the new architecture; parallel attention and feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.config.model_config import ModelLoadError, optional, required
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.causal import Layer, ParallelLayer, PreNormLayer
from pagewire.services.executor.models.dense.gpt_neox import fused_attention
from pagewire.services.executor.models.layer_norm_model import LayerNormConfig, LayerNormModel, layer_norm_values

_ONE_NORM = ("input_layernorm",)


@dataclass(frozen=True, kw_only=True)
class FalconConfig(LayerNormConfig):
    parallel: bool  # attention and feed-forward
    norms: tuple[str, ...]  # if parallel: one norm for both, or one for attention and one for feed-forward


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
    norms = ("ln_attn", "ln_mlp") if is_new and optional(raw, "num_ln_in_parallel_attn", 2) == 2 else _ONE_NORM
    return FalconConfig(
        **values, parallel=is_new or raw.get("parallel_attn", True), norms=tuple(raw.get("norms") or norms)
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
        first, *second = (self.layer_norm(name, placement) for name in self.config.norms)
        if self.config.parallel:
            return ParallelLayer(first, attention, mlp, *second)
        return PreNormLayer(first, attention, self.layer_norm("post_attention_layernorm", placement), mlp)


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Names the first norm the same whether it is one of two, the feed-forward's, or the only one."""
    two_norms = "blk.0.attn_norm_2.weight" in stated
    return {
        "new_decoder_architecture": True,  # allows any number of KV heads
        "num_kv_heads": keys["num_key_value_heads"],
        "ffn_hidden_size": keys["intermediate_size"],
        "bias": keys["attention_bias"],
        "norms": ("ln_attn", *_ONE_NORM) if two_norms else _ONE_NORM,
    }


_GGUF = GgufForm(
    "falcon",
    qkv_apart=True,
    layers="transformer.h",
    names={
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "attn_norm_2": "ln_attn",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    numbers={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    derived_keys=_gguf_keys,
)

ARCHITECTURES = (Architecture("FalconForCausalLM", "falcon", falcon_config, FalconModel, _GGUF, base="transformer."),)

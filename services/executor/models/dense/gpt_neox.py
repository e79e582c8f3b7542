"""GPT-NeoX and Pythia: parallel attention and feed-forward, each with its norm; a part of each head is rotated.

A checkpoint has queries, keys and values head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, required
from pagewire.services.executor.layers.attention.heads import heads_of
from pagewire.services.executor.layers.attention.self_attention import SelfAttention, head_attention
from pagewire.services.executor.layers.linear import Linear, Split
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.layers.row_order import qkv_apart
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.causal import Layer, ParallelLayer, PreNormLayer
from pagewire.services.executor.models.layer_norm_model import LayerNormConfig, LayerNormModel, layer_norm_values


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(LayerNormConfig):
    parallel: bool  # attention and feed-forward


def gpt_neox_config(raw: Mapping[str, Any], dtype: torch.dtype) -> GPTNeoXConfig:
    """Reads the config, including `rotary_pct` and `rotary_emb_base` of files before transformers 5."""
    raw = {
        "partial_rotary_factor": raw.get("rotary_pct", 0.25),
        "rope_theta": raw.get("rotary_emb_base", 10000.0),
        "hidden_act": "gelu",
        **raw,
        "num_key_value_heads": required(raw, "num_attention_heads"),
    }
    bias = raw.get("attention_bias", True)
    values = layer_norm_values(raw, dtype, qkv_bias=bias, attention_output_bias=bias, mlp_bias=True)
    return GPTNeoXConfig(**values, parallel=raw.get("use_parallel_residual", True))


def fused_attention(
    config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding, placement: Placement
) -> SelfAttention:
    """Returns attention with one projection that gives, KV head by KV head, its queries, its key and its value."""
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    shards, own = {"query_key_value": (heads + 2 * kv_heads) * head_dim}, heads_of(config, placement)
    rows = {"query_key_value": own.rows(qkv_apart(heads, kv_heads, head_dim))}
    return SelfAttention(
        Linear(config.hidden_size, shards, placement, bias=config.qkv_bias, rows=rows),
        head_attention(config, layer_idx, rotary, own),
        Linear(
            heads * head_dim,
            {"dense": config.hidden_size},
            placement,
            bias=config.attention_output_bias,
            split=Split.INPUTS,
        ),
    )


class GPTNeoXModel(LayerNormModel):
    body_name = "gpt_neox"
    embed_name = "embed_in"
    norm_name = "final_layer_norm"
    head_name = "embed_out"
    config: GPTNeoXConfig

    def layer(self, layer_idx: int, placement: Placement) -> Layer:
        input_norm = self.layer_norm("input_layernorm", placement)
        attention = fused_attention(self.config, layer_idx, self.rotary, placement.within("attention"))
        mlp_norm = self.layer_norm("post_attention_layernorm", placement)
        mlp = self.plain_mlp("dense_h_to_4h", "dense_4h_to_h", placement.within("mlp"))
        if self.config.parallel:
            return ParallelLayer(input_norm, attention, mlp, mlp_norm)
        return PreNormLayer(input_norm, attention, mlp_norm, mlp)

    def ignored(self, name: str) -> bool:
        """Returns whether a checkpoint may hold this tensor although the model does not use it, such as masks of old
        files."""
        return super().ignored(name) or name.endswith((".attention.bias", ".attention.masked_bias"))


_GGUF = GgufForm(
    "gptneox",
    qkv_apart=True,
    layers="gpt_neox.layers",
    names={
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    numbers={"attention.layer_norm_epsilon": "layer_norm_eps"},
    flags={"use_parallel_residual": "use_parallel_residual"},
)

ARCHITECTURES = (
    Architecture("GPTNeoXForCausalLM", "gpt_neox", gpt_neox_config, GPTNeoXModel, _GGUF, base="gpt_neox."),
)

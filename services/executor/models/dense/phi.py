"""Phi-1, Phi-1.5 and Phi-2: parallel attention and feed-forward, a part of each head rotated, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.attention.self_attention import llama_attention
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import DECODER_NAMES, FUSED_HEADS, Architecture, GgufForm
from pagewire.services.executor.models.causal import Layer, ParallelLayer
from pagewire.services.executor.models.layer_norm_model import LayerNormConfig, LayerNormModel, layer_norm_values


def phi_config(raw: Mapping[str, Any], dtype: torch.dtype) -> LayerNormConfig:
    if raw.get("qk_layernorm"):
        raise ModelLoadError(
            "config key qk_layernorm: norms of queries and keys are not implemented for PhiForCausalLM; use "
            "--model-impl transformers"
        )
    raw = {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5, **raw}
    values = layer_norm_values(raw, dtype, qkv_bias=True, attention_output_bias=True, mlp_bias=True)
    return LayerNormConfig(**values)


class PhiModel(LayerNormModel):
    norm_name = "final_layernorm"
    head_has_bias = True

    def layer(self, layer_idx: int, placement: Placement) -> Layer:
        attention = placement.within("self_attn")
        return ParallelLayer(
            self.layer_norm("input_layernorm", placement),
            llama_attention(self.config, layer_idx, self.rotary, attention, output="dense"),
            self.plain_mlp("fc1", "fc2", placement.within("mlp")),
        )


_GGUF = GgufForm(
    "phi2",
    names={
        **DECODER_NAMES,
        "output_norm": "model.final_layernorm",
        "attn_qkv": FUSED_HEADS,
        "attn_output": "self_attn.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
    numbers={"attention.layer_norm_epsilon": "layer_norm_eps"},
)

ARCHITECTURES = (Architecture("PhiForCausalLM", "phi", phi_config, PhiModel, _GGUF),)

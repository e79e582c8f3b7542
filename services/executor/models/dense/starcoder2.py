"""StarCoder2: Llama's attention, LayerNorm and a plain feed-forward block, all with biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import required, sliding_window
from pagewire.services.executor.layers.attention.self_attention import llama_attention
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import DECODER_NAMES, Architecture, GgufForm
from pagewire.services.executor.models.causal import Layer, PreNormLayer
from pagewire.services.executor.models.layer_norm_model import LayerNormConfig, LayerNormModel, layer_norm_values


def starcoder2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> LayerNormConfig:
    raw = {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, **raw}
    bias = raw.get("use_bias", True)
    values = layer_norm_values(
        raw,
        dtype,
        eps="norm_epsilon",
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=bias,
        sliding_windows=(sliding_window(raw),) * required(raw, "num_hidden_layers"),
    )
    return LayerNormConfig(**values)


class Starcoder2Model(LayerNormModel):
    def layer(self, layer_idx: int, placement: Placement) -> Layer:
        return PreNormLayer(
            self.layer_norm("input_layernorm", placement),
            llama_attention(self.config, layer_idx, self.rotary, placement.within("self_attn")),
            self.layer_norm("post_attention_layernorm", placement),
            self.plain_mlp("c_fc", "c_proj", placement.within("mlp")),
        )


_GGUF = GgufForm(
    "starcoder2",
    names={**DECODER_NAMES, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    numbers={"attention.layer_norm_epsilon": "norm_epsilon"},
)

ARCHITECTURES = (Architecture("Starcoder2ForCausalLM", "starcoder2", starcoder2_config, Starcoder2Model, _GGUF),)

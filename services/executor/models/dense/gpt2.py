"""GPT-2: learned positions, and weights that are transposed in checkpoints other than GGUF files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError, optional, required
from pagewire.services.executor.layers.attention.heads import heads_of
from pagewire.services.executor.layers.attention.self_attention import SelfAttention, head_attention
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import Linear, Split
from pagewire.services.executor.layers.mlp import MLP, plain_activation
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.causal import Layer, PreNormLayer
from pagewire.services.executor.models.layer_norm_model import LayerNormConfig, LayerNormModel, layer_norm_values
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext


@dataclass(frozen=True, kw_only=True)
class GPT2Config(LayerNormConfig):
    scales_scores: bool  # by 1 / sqrt(head_dim)
    divides_by_layer: bool  # scores of layer i by i + 1
    transposed: bool  # the checkpoint has weights as [in_features, out_features]


def gpt2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> GPT2Config:
    if raw.get("add_cross_attention"):
        raise ModelLoadError("config key add_cross_attention: a decoder of an encoder's states cannot be served")
    hidden_size = required(raw, "n_embd")
    keys = {
        "hidden_size": hidden_size,
        "intermediate_size": optional(raw, "n_inner", 4 * hidden_size),
        "num_hidden_layers": required(raw, "n_layer"),
        "num_attention_heads": required(raw, "n_head"),
        "num_key_value_heads": required(raw, "n_head"),
        "max_position_embeddings": required(raw, "n_positions"),
        "hidden_act": raw.get("activation_function", "gelu_new"),
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
    }
    values = layer_norm_values(
        {**raw, **keys},
        dtype,
        eps="layer_norm_epsilon",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    )
    return GPT2Config(
        **values,
        scales_scores=raw.get("scale_attn_weights", True),
        divides_by_layer=raw.get("scale_attn_by_inverse_layer_idx", False),
        transposed=raw.get("transposed", True),
    )


class GPT2Model(LayerNormModel):
    body_name = "transformer"
    embed_name = "wte"
    layers_name = "h"
    norm_name = "ln_f"
    config: GPT2Config

    def __init__(self, config: GPT2Config, max_model_len: int, placement: Placement) -> None:
        super().__init__(config, max_model_len, placement)
        body = placement.within(self.body_name)
        first = body.where(self.stage.is_first)
        self.positions = Embedding("wpe", config.max_position_embeddings, config.hidden_size, first)

    def layer(self, layer_idx: int, placement: Placement) -> Layer:
        config, size, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        scale = config.head_dim**-0.5 if config.scales_scores else 1.0
        if config.divides_by_layer:
            scale /= layer_idx + 1
        attention, mlp = placement.within("attn"), placement.within("mlp")
        heads = heads_of(config, placement)
        return PreNormLayer(
            self.layer_norm("ln_1", placement),
            SelfAttention(
                Linear(
                    size,
                    {"c_attn": 3 * size},
                    attention,
                    bias=True,
                    rows={"c_attn": heads.rows()},
                    transposed=config.transposed,
                ),
                head_attention(config, layer_idx, None, heads, scale=scale),
                Linear(size, {"c_proj": size}, attention, bias=True, transposed=config.transposed, split=Split.INPUTS),
            ),
            self.layer_norm("ln_2", placement),
            MLP(
                Linear(size, {"c_fc": inner}, mlp, bias=True, transposed=config.transposed, split=Split.OUTPUTS),
                plain_activation(config.hidden_act),
                Linear(inner, {"c_proj": size}, mlp, bias=True, transposed=config.transposed, split=Split.INPUTS),
            ),
        )

    def leaves(self) -> Iterator[Leaf]:
        if self.stage.is_first:
            yield self.positions
        yield from super().leaves()

    def embedded(self, input_ids: Tensor, context: StepContext) -> Tensor:
        return self.embed(input_ids).add_(self.positions(context.positions))

    def ignored(self, name: str) -> bool:
        """Returns whether a checkpoint may hold this tensor although the model does not use it, such as masks of old
        files."""
        return super().ignored(name) or name.endswith((".attn.bias", ".attn.masked_bias"))


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "n_embd": keys["hidden_size"],
        "n_inner": keys["intermediate_size"],
        "n_layer": keys["num_hidden_layers"],
        "n_head": keys["num_attention_heads"],
        "n_positions": keys["max_position_embeddings"],
        "transposed": False,
    }


_GGUF = GgufForm(
    "gpt2",
    layers="transformer.h",
    names={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    numbers={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
    derived_keys=_gguf_keys,
)

ARCHITECTURES = (Architecture("GPT2LMHeadModel", "gpt2", gpt2_config, GPT2Model, _GGUF, base="transformer."),)

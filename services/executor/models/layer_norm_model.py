"""The common part of models with a final LayerNorm; their layers and the names in checkpoints differ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config, positive_number
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import Linear, Split, output_head
from pagewire.services.executor.layers.mlp import MLP, plain_activation
from pagewire.services.executor.layers.norm import LayerNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.causal import CausalModel, Layer


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(DecoderConfig):
    """`rms_norm_eps` has no meaning here."""

    layer_norm_eps: float


def layer_norm_values(
    raw: Mapping[str, Any], dtype: torch.dtype, *, eps: str = "layer_norm_eps", **family: Any
) -> dict[str, Any]:
    """Returns the values of a `LayerNormConfig`. eps: the key that has it. family: see `decoder_config`."""
    return {**vars(decoder_config(raw, dtype, **family)), "layer_norm_eps": positive_number(raw, eps, 1e-5)}


class LayerNormModel(CausalModel):
    """The base class of these models. A model defines its names and its layers."""

    body_name: str = "model"
    embed_name: str = "embed_tokens"
    layers_name: str = "layers"
    norm_name: str = "norm"
    norm_has_bias: bool = True
    head_has_bias: bool = False

    def __init__(self, config: LayerNormConfig, max_model_len: int, placement: Placement) -> None:
        body, stage = placement.within(self.body_name), placement.stage
        size, tied = config.hidden_size, config.tie_word_embeddings
        self.config: LayerNormConfig = config
        self.stage = stage
        self.hidden_dtype = self.stream_dtype = placement.result_dtype
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, placement.device)
        embedding = body.where(stage.is_first or (tied and stage.is_last))
        self.embed = Embedding(self.embed_name, config.vocab_size, size, embedding, projects=tied, split=True)
        self.layers = [
            self.layer(layer_idx, body.within(f"{self.layers_name}.{layer_idx}"))
            for layer_idx in stage.layers(config.num_layers)
        ]
        end, head = body.where(stage.is_last), placement.where(stage.is_last)
        self.norm = LayerNorm(self.norm_name, size, config.layer_norm_eps, end, bias=self.norm_has_bias)
        self.lm_head = (
            None if tied else output_head(size, {self.head_name: config.vocab_size}, head, bias=self.head_has_bias)
        )

    @abstractmethod
    def layer(self, layer_idx: int, placement: Placement) -> Layer:
        """Returns a new layer. placement: the layer's in the checkpoint."""

    def layer_norm(self, name: str, placement: Placement) -> LayerNorm:
        """Returns a norm like the model's last one, with another name."""
        config = self.config
        return LayerNorm(name, config.hidden_size, config.layer_norm_eps, placement, bias=self.norm_has_bias)

    def plain_mlp(self, up: str, down: str, placement: Placement) -> MLP:
        """Two projections by their names, with an activation between."""
        config = self.config
        return MLP(
            Linear(
                config.hidden_size,
                {up: config.intermediate_size},
                placement,
                bias=config.mlp_bias,
                split=Split.OUTPUTS,
            ),
            plain_activation(config.hidden_act),
            Linear(
                config.intermediate_size,
                {down: config.hidden_size},
                placement,
                bias=config.mlp_bias,
                split=Split.INPUTS,
            ),
        )

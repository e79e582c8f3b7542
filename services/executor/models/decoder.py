"""The decoder that Llama, Qwen2 and Qwen3 share; the differences are in their `ModelConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from pagewire.services.executor.config.model_config import DecoderConfig
from pagewire.services.executor.layers.attention.self_attention import llama_attention
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import output_head
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.causal import Attention, CausalModel, FeedForward, Layer, PreNormLayer

__all__ = ["Attention", "DecoderLayer", "DecoderModel", "FeedForward"]


class DecoderLayer(PreNormLayer):
    """Llama's layer. Other models replace one of its halves."""

    __slots__ = ()

    def __init__(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            RMSNorm("input_layernorm", size, eps, placement),
            self.self_attention(config, layer_idx, rotary, placement.within("self_attn")),
            RMSNorm("post_attention_layernorm", size, eps, placement),
            self.feed_forward(config, layer_idx, placement),
        )

    def self_attention(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> Attention:
        return llama_attention(config, layer_idx, rotary, placement)

    def feed_forward(self, config: DecoderConfig, layer_idx: int, placement: Placement) -> FeedForward:
        return GatedMLP(config, placement.within("mlp"))


class LayerClass(Protocol):
    """A function that makes a model's layers."""

    def __call__(self, config: Any, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement) -> Layer: ...


class DecoderModel(CausalModel):
    """A decoder-only language model with Llama's names and its norm."""

    layer: LayerClass = DecoderLayer

    def __init__(
        self,
        config: DecoderConfig,
        max_model_len: int,
        placement: Placement,
        *,
        body_name: str = "model",
        head_name: str = "lm_head",
    ) -> None:
        """body_name, head_name: names of the decoder and its output projection in the checkpoint."""
        body, stage, tied = placement.within(body_name), placement.stage, config.tie_word_embeddings
        self.config: DecoderConfig = config
        self.stage = stage
        self.hidden_dtype, self.stream_dtype = placement.result_dtype, placement.stream_dtype
        self.head_name = head_name
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, placement.device)
        has_embedding = stage.is_first or (tied and stage.is_last)
        self.embed = Embedding(
            "embed_tokens", config.vocab_size, config.hidden_size, body.where(has_embedding), projects=tied, split=True
        )
        rotaries = self.rotaries(config, max_model_len, placement.device)
        self.layers = [
            self.layer(config, layer_idx, rotaries[layer_idx], body.within(f"layers.{layer_idx}"))
            for layer_idx in stage.layers(config.num_layers)
        ]
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, body.where(stage.is_last))
        head, sizes = placement.where(stage.is_last), {head_name: config.vocab_size}
        self.lm_head = None if tied else output_head(config.hidden_size, sizes, head)

    def rotaries(
        self, config: DecoderConfig, max_model_len: int, device: torch.device
    ) -> Sequence[RotaryEmbedding | None]:
        """Returns the rotary of each layer, None for layers that do not rotate. By default all have `self.rotary`."""
        return [self.rotary] * config.num_layers

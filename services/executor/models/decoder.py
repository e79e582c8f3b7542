"""The decoder that Llama, Qwen2 and Qwen3 share; what differs between them is in their `ModelConfig`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.layers.self_attention import SelfAttention
from pagewire.services.executor.layers.weight_format import Quantization
from pagewire.services.executor.model_config import DecoderConfig
from pagewire.services.executor.models.protocol import Leaf, OwnModel
from pagewire.services.executor.step_context import StepContext


class DecoderLayer:
    """Pre-norm attention and feed-forward. Each half returns its output not yet added to the residual stream."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding, placement: Placement) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm("input_layernorm", size, eps, placement)
        self.attention = SelfAttention(config, layer_idx, rotary, placement.within("self_attn"))
        self.post_attention_norm = RMSNorm("post_attention_layernorm", size, eps, placement)
        self.mlp = GatedMLP(config, placement.within("mlp"))

    def __call__(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        """hidden is the previous layer's output; the sum of all layers so far is kept in `residual`, in place."""
        hidden = self.attention(self.input_norm.add(hidden, residual), context)
        return self.mlp(self.post_attention_norm.add(hidden, residual))

    def leaves(self) -> Iterator[Leaf]:
        yield self.input_norm
        yield from self.attention.leaves()
        yield self.post_attention_norm
        yield from self.mlp.leaves()


class DecoderModel(OwnModel):
    """A decoder-only language model."""

    def __init__(
        self,
        config: DecoderConfig,
        max_model_len: int,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        placement = Placement(config.dtype, device, quantization)
        body = placement.within("model")
        rotary = RotaryEmbedding(config, max_model_len, device)
        self.config: DecoderConfig = config
        self.embed = Embedding(
            "embed_tokens", config.vocab_size, config.hidden_size, body, projects=config.tie_word_embeddings
        )
        self.layers = [
            DecoderLayer(config, layer_idx, rotary, body.within(f"layers.{layer_idx}"))
            for layer_idx in range(config.num_layers)
        ]
        self.norm = RMSNorm("norm", config.hidden_size, config.rms_norm_eps, body)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, {"lm_head": config.vocab_size}, placement, bias=False)
        )

    def leaves(self) -> Iterator[Leaf]:
        yield self.embed
        for layer in self.layers:
            yield from layer.leaves()
        yield self.norm
        if self.lm_head is not None:
            yield self.lm_head

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        hidden = self.embed(input_ids)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden = layer(hidden, residual, context)
        return self.norm.add(hidden, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.embed.project(hidden) if self.lm_head is None else self.lm_head(hidden)

    def ignored(self, name: str) -> bool:
        tied_copy = self.config.tie_word_embeddings and name == "lm_head.weight"
        return tied_copy or name.endswith("rotary_emb.inv_freq")

"""The decoder that Llama, Qwen2 and Qwen3 share; what differs between them is in their `ModelConfig`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from services.executor.attention import AttentionMetadata, PagedAttention
from services.executor.layers.embedding import Embedding
from services.executor.layers.linear import Linear
from services.executor.layers.mlp import GatedMLP
from services.executor.layers.norm import RMSNorm
from services.executor.layers.placement import Placement
from services.executor.layers.rotary import RotaryEmbedding
from services.executor.layers.self_attention import SelfAttention
from services.executor.model_config import ModelConfig


class DecoderLayer:
    """Pre-norm attention and feed-forward. Each half returns its output not yet added to the residual stream."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, config: ModelConfig, layer_idx: int, rotary: RotaryEmbedding, placement: Placement) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, placement)
        self.attention = SelfAttention(config, layer_idx, rotary, placement)
        self.post_attention_norm = RMSNorm(size, eps, placement)
        self.mlp = GatedMLP(config, placement)

    def __call__(self, positions: Tensor, hidden: Tensor, residual: Tensor, attn: AttentionMetadata) -> Tensor:
        """hidden is the previous layer's output; the sum of all layers so far is kept in `residual`, in place."""
        hidden = self.attention(positions, self.input_norm.add(hidden, residual), attn)
        return self.mlp(self.post_attention_norm.add(hidden, residual))

    def load_targets(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.input_norm.load_targets(f"{prefix}input_layernorm")
        yield from self.attention.load_targets(f"{prefix}self_attn.")
        yield from self.post_attention_norm.load_targets(f"{prefix}post_attention_layernorm")
        yield from self.mlp.load_targets(f"{prefix}mlp.")


class DecoderModel:
    """A decoder-only language model with uninitialised weights; the loader writes them through `load_targets`."""

    capturable = True

    def __init__(self, config: ModelConfig, max_model_len: int, device: torch.device) -> None:
        placement = Placement(config.dtype, device)
        rotary = RotaryEmbedding(config, max_model_len, device)
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, placement)
        self.layers = [DecoderLayer(config, layer_idx, rotary, placement) for layer_idx in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, {"lm_head": config.vocab_size}, placement, bias=False)
        )

    @property
    def attention_layers(self) -> list[PagedAttention]:
        """Those that need a KV cache, in layer order."""
        return [layer.attention.attention for layer in self.layers]

    @property
    def weight_bytes(self) -> int:
        return sum(target.nbytes for target in self.load_targets().values())

    def bind_kv_cache(self, kv_caches: list[Tensor]) -> None:
        """One [num_blocks, 2, num_kv_heads, block_size, head_dim] per attention layer, in layer order."""
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            layer.attention.attention.kv_cache = kv_cache

    def forward(self, input_ids: Tensor, positions: Tensor, attn: AttentionMetadata) -> Tensor:
        """input_ids, positions int64 [num_tokens] -> normalised hidden states [num_tokens, hidden_size]"""
        hidden = self.embed(input_ids)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden = layer(positions, hidden, residual, attn)
        return self.norm.add(hidden, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> [S, vocab_size] in the model's dtype"""
        return self.embed.project(hidden) if self.lm_head is None else self.lm_head(hidden)

    def load_targets(self) -> dict[str, Tensor]:
        """Checkpoint tensor name (Hugging Face) -> the memory it is written to, of the shape it must have."""
        targets = dict(self.embed.load_targets("model.embed_tokens"))
        for layer_idx, layer in enumerate(self.layers):
            targets.update(layer.load_targets(f"model.layers.{layer_idx}."))
        targets.update(self.norm.load_targets("model.norm"))
        if self.lm_head is not None:
            targets.update(self.lm_head.load_targets(""))
        return targets

    def ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no place for it."""
        tied_copy = self.config.tie_word_embeddings and name == "lm_head.weight"
        return tied_copy or name.endswith("rotary_emb.inv_freq")

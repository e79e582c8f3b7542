"""The decoder that Llama, Qwen2 and Qwen3 share; what differs between them is in their `ModelConfig`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pagewire.services.executor.attention import AttentionMetadata, PagedAttention
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.layers.self_attention import SelfAttention
from pagewire.services.executor.layers.weights import WeightModule
from pagewire.services.executor.loading.model_config import ModelConfig
from pagewire.services.executor.loading.quantization import Quantization


class DecoderLayer:
    """Pre-norm attention and feed-forward. Each half returns its output not yet added to the residual stream."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, config: ModelConfig, layer_idx: int, rotary: RotaryEmbedding, placement: Placement) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm("input_layernorm", size, eps, placement)
        self.attention = SelfAttention(config, layer_idx, rotary, placement.within("self_attn"))
        self.post_attention_norm = RMSNorm("post_attention_layernorm", size, eps, placement)
        self.mlp = GatedMLP(config, placement.within("mlp"))

    def __call__(self, positions: Tensor, hidden: Tensor, residual: Tensor, attn: AttentionMetadata) -> Tensor:
        """hidden is the previous layer's output; the sum of all layers so far is kept in `residual`, in place."""
        hidden = self.attention(positions, self.input_norm.add(hidden, residual), attn)
        return self.mlp(self.post_attention_norm.add(hidden, residual))

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.input_norm.load_targets()
        yield from self.attention.load_targets()
        yield from self.post_attention_norm.load_targets()
        yield from self.mlp.load_targets()

    def modules(self) -> Iterator[WeightModule]:
        yield from self.attention.modules()
        yield from self.mlp.modules()


class DecoderModel:
    """A decoder-only language model with uninitialised weights; the loader writes them through `load_targets`."""

    capturable = True

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        device: torch.device,
        quantization: Quantization | None = None,
    ) -> None:
        placement = Placement(config.dtype, device, quantization)
        body = placement.within("model")
        rotary = RotaryEmbedding(config, max_model_len, device)
        self.config = config
        self.embed = Embedding("embed_tokens", config.vocab_size, config.hidden_size, body)
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

    @property
    def attention_layers(self) -> list[PagedAttention]:
        """Those that need a KV cache, in layer order."""
        return [layer.attention.attention for layer in self.layers]

    @property
    def weight_bytes(self) -> int:
        """Of what is loaded; quantized weights as they are packed."""
        vectors = sum(vector.nbytes for vector in self.vectors().values())
        return vectors + sum(part.nbytes for module in self.modules() for part in module.parts)

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
        """Name of a dense tensor (Hugging Face) -> the memory it is written to, of the shape it must have."""
        targets = dict(self.embed.load_targets())
        for layer in self.layers:
            targets.update(layer.load_targets())
        targets.update(self.norm.load_targets())
        if self.lm_head is not None:
            targets.update(self.lm_head.load_targets())
        return targets

    def vectors(self) -> dict[str, Tensor]:
        """The load targets that are not weights of modules: norms and biases."""
        weights = {f"{shard.name}.weight" for module in self.modules() for shard in module.shards}
        return {name: target for name, target in self.load_targets().items() if name not in weights}

    def modules(self) -> list[WeightModule]:
        """Embedding, linear layers and head."""
        modules: list[WeightModule] = [self.embed]
        for layer in self.layers:
            modules.extend(layer.modules())
        if self.lm_head is not None:
            modules.append(self.lm_head)
        return modules

    def quantized_modules(self) -> list[WeightModule]:
        """Those that the loader reads, packs and installs; the others' weights are load targets."""
        return [module for module in self.modules() if any(shard.format is not None for shard in module.shards)]

    def ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no place for it."""
        tied_copy = self.config.tie_word_embeddings and name == "lm_head.weight"
        return tied_copy or name.endswith("rotary_emb.inv_freq")

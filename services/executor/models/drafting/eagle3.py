"""EAGLE-3: one decoder layer that drafts from intermediate results of a larger model.

https://arxiv.org/abs/2503.01840; names and order of computation are those of its checkpoints. At each position the
layer reads the embedding of the next token and a feature: `fc` of the target's stream before some of its layers. Behind
the last token that the target has computed, the feature is the layer's own output of the previous position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError, optional
from pagewire.services.executor.layers.attention.self_attention import llama_attention
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.dense.gemma2 import GemmaModel
from pagewire.services.executor.models.dense.llama import llama_config
from pagewire.services.executor.models.drafting.draft_head import DraftHead, FeatureMemory
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext

# Tensors of checkpoints: draft id -> offset to the target's id; whether a target's id has a draft id.
TABLES = ("d2t", "t2d")


class Features(FeatureMemory):
    """The output of `fc` for the target's stream at some layers."""

    def __init__(self, fc: Linear, size: int, dtype: torch.dtype, layers: tuple[int, ...]) -> None:
        """fc: projects the concatenated streams before `layers`, which are ascending."""
        super().__init__(size, dtype)
        self._fc, self._layers = fc, layers
        self._streams: list[Tensor] = []

    def see(self, layer_idx: int, stream: Callable[[], Tensor], context: StepContext) -> None:
        if layer_idx not in self._layers:
            return
        self._streams += [stream().to(self.dtype)] * self._layers.count(layer_idx)  # two may coincide
        if layer_idx == self._layers[-1]:
            features = self._fc(torch.cat(self._streams, dim=1))
            self._streams.clear()
            self.keep(features, context)


class Eagle3Head(DraftHead):
    """A draft model for one target; its `features` are the target's `observer`."""

    def __init__(
        self, raw: Mapping[str, Any], target: CausalModel | GemmaModel, max_model_len: int, placement: Placement
    ) -> None:
        """raw: its config.json. Raises ModelLoadError."""
        config = llama_config({**raw, "architectures": ["LlamaForCausalLMEagle3"]}, placement.dtype)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        layer = placement.within("midlayer")
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, placement.device)
        self.embed = target.embed
        layers = aux_layers(raw, len(target.layers))
        self.fc = Linear(target.config.hidden_size * len(layers), {"fc": size}, placement, bias=False)
        self.features = Features(self.fc, size, placement.dtype, layers)
        self.input_norm = RMSNorm("input_layernorm", size, eps, layer)
        self.hidden_norm = RMSNorm("hidden_norm", size, eps, layer)
        self.attention = llama_attention(config, 0, rotary, layer.within("self_attn"))
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
        self.attention.qkv = Linear(
            2 * size,
            {name: count * config.head_dim for name, count in heads.items()},
            layer.within("self_attn"),
            bias=config.qkv_bias,
        )
        self.post_norm = RMSNorm("post_attention_layernorm", size, eps, layer)
        self.mlp = GatedMLP(config, layer.within("mlp"))
        self.norm = RMSNorm("norm", size, eps, placement)
        draft_vocab = optional(raw, "draft_vocab_size", config.vocab_size)
        self.lm_head = Linear(size, {"lm_head": draft_vocab}, placement, bias=False)
        self.token_ids = torch.arange(draft_vocab, device=placement.device)  # target ids of the head's outputs

    def leaves(self) -> Iterator[Leaf]:
        if self.own_embed is not None:
            yield self.own_embed
        yield from (self.fc, self.features, self.input_norm, self.hidden_norm)
        yield from self.attention.leaves()
        yield self.post_norm
        yield from self.mlp.leaves()
        yield from (self.norm, self.lm_head)

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        embedded = self.embed(input_ids)
        residual = self.features.read(context)
        normed = self.hidden_norm.add(torch.zeros_like(residual), residual)
        both = torch.cat((self.input_norm.add(embedded, torch.zeros_like(embedded)), normed), dim=1)
        hidden = self.mlp(self.post_norm.add(self.attention(both, context), residual))
        normed = self.norm.add(hidden, residual)
        return torch.cat((normed, residual), dim=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self.lm_head(hidden[:, : self.config.hidden_size].contiguous())
        whole = torch.full((len(hidden), self.config.vocab_size), -torch.inf, dtype=logits.dtype, device=logits.device)
        return whole.index_copy_(1, self.token_ids, logits)

    def ignored(self, name: str) -> bool:
        return name in TABLES


def aux_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the target's layers before which its stream is read. Raises ModelLoadError."""
    stated = raw.get("eagle_aux_hidden_state_layer_ids") or (raw.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    layers = tuple(stated) if stated else (2, num_layers // 2, num_layers - 3)
    if list(layers) != sorted(layers) or not all(0 <= layer < num_layers for layer in layers):
        raise ModelLoadError(
            f"EAGLE-3 head: it reads what the model has before its layers {', '.join(map(str, layers))}, the model has "
            f"{num_layers}: use the head of this model"
        )
    return layers

"""EAGLE: one decoder layer that drafts from the input of a larger model's output projection.

https://arxiv.org/abs/2401.15077; names and order of computation are those of its checkpoints. At each position the
layer reads `fc` of two vectors: the embedding of the next token, and the model's output. Behind the last token that the
model has computed, the layer's own output of the previous position replaces the latter. The output projection is the
model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.attention.self_attention import llama_attention
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.dense.gemma2 import GemmaModel
from pagewire.services.executor.models.dense.llama import llama_config
from pagewire.services.executor.models.drafting.draft_head import DraftHead, OwnOutputs
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext


class EagleHead(DraftHead):
    """Llama's layer without the norm before its attention."""

    def __init__(
        self,
        raw: Mapping[str, Any],
        target: CausalModel | GemmaModel,
        max_model_len: int,
        placement: Placement,
        *,
        bias: bool,
    ) -> None:
        """raw: its config.json. bias: whether `fc` has one. Raises ModelLoadError."""
        config = llama_config({**raw, "architectures": ["LlamaForCausalLMEagle"]}, placement.dtype)
        if config.num_layers != 1:
            raise ModelLoadError(
                f"EAGLE head: it has {config.num_layers} layers, and only those with one are supported"
            )
        size, layer = config.hidden_size, placement.within("layers.0")
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, placement.device)
        self.config = config
        self._target = target
        self.embed = target.embed
        self.fc = Linear(2 * size, {"fc": size}, placement, bias=bias)
        self.attention = llama_attention(config, 0, rotary, layer.within("self_attn"))
        self.post_norm = RMSNorm("post_attention_layernorm", size, config.rms_norm_eps, layer)
        self.mlp = GatedMLP(config, layer.within("mlp"))
        self.features = OwnOutputs(size, placement.dtype)

    def leaves(self) -> Iterator[Leaf]:
        if self.own_embed is not None:
            yield self.own_embed
        yield from (self.fc, self.features)
        yield from self.attention.leaves()
        yield self.post_norm
        yield from self.mlp.leaves()

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        stream = self.fc(torch.cat((self.embed(input_ids), self.features.read(context)), dim=1))
        attended = self.attention(stream, context)
        output = self.mlp(self.post_norm.add(attended, stream)) + stream  # the norm adds to the stream
        return torch.cat((output, output), dim=1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._target.compute_logits(hidden[:, : self.config.hidden_size].contiguous())

    def ignored(self, name: str) -> bool:
        """A copy of the model's output projection, and of its first layer's norm."""
        return name in ("lm_head.weight", "layers.0.input_layernorm.weight")

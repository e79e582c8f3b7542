"""GLM-4: neighbours in a part of each head are rotated; GLM-4-0414 also normalises the output of each layer half."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config
from pagewire.services.executor.layers.attention.self_attention import SelfAttention, llama_attention
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.architecture import FUSED_HEADS, Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderLayer, DecoderModel, FeedForward
from pagewire.services.executor.models.dense.phi3 import FUSED_NAMES, fused_gated_mlp
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext


def glm_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    raw = {"partial_rotary_factor": 0.5, **raw}
    return decoder_config(raw, dtype, qkv_bias=raw.get("attention_bias", True))


class GlmLayer(DecoderLayer):
    __slots__ = ()

    def self_attention(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> SelfAttention:
        return llama_attention(config, layer_idx, rotary, placement, rotates_neighbours=True)

    def feed_forward(self, config: DecoderConfig, layer_idx: int, placement: Placement) -> FeedForward:
        return fused_gated_mlp(config, placement.within("mlp"))


class Glm4Layer(GlmLayer):
    __slots__ = ("post_mlp_norm", "post_self_attention_norm")

    def __init__(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> None:
        super().__init__(config, layer_idx, rotary, placement)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.post_self_attention_norm = RMSNorm("post_self_attn_layernorm", size, eps, placement)
        self.post_mlp_norm = RMSNorm("post_mlp_layernorm", size, eps, placement)

    def __call__(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        hidden = self.attention(self.input_norm.add(hidden, residual), context)
        self.post_self_attention_norm.normalize(hidden)
        hidden = self.mlp(self.post_attention_norm.add(hidden, residual))
        self.post_mlp_norm.normalize(hidden)
        return hidden

    def leaves(self) -> Iterator[Leaf]:
        yield from super().leaves()
        yield from (self.post_self_attention_norm, self.post_mlp_norm)


class GlmModel(DecoderModel):
    layer = GlmLayer


class Glm4Model(DecoderModel):
    layer = Glm4Layer


_GGUF4_NAMES = {
    **FUSED_NAMES,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}

# ChatGLM's own format has queries, keys and values in one tensor.
_GGUF = GgufForm("chatglm", names={**FUSED_NAMES, "attn_qkv": FUSED_HEADS})

ARCHITECTURES = (
    Architecture("GlmForCausalLM", "glm", glm_config, GlmModel, _GGUF),
    Architecture("Glm4ForCausalLM", "glm4", glm_config, Glm4Model, GgufForm("glm4", names=_GGUF4_NAMES)),
)

"""OLMo 2 and 3: norms follow attention and feed-forward, and are applied to all queries together, and to all keys.
Three of four layers of OLMo 3 have a window and unscaled rotary positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import DecoderConfig, layer_windows, optional, required
from pagewire.services.executor.config.rope_config import RopeConfig, rope_config
from pagewire.services.executor.layers.attention.heads import heads_of
from pagewire.services.executor.layers.attention.self_attention import head_attention
from pagewire.services.executor.layers.linear import Linear, Split
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.norm import RMSNorm, SplitRMSNorms
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.architecture import DECODER_NAMES, Architecture, GgufForm
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.dense.llama import llama_config
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext

_EPS = 1e-5  # default of rms_norm_eps


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(DecoderConfig):
    """`rope` is that of layers without a window."""

    window_rope: RopeConfig


def olmo2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> Olmo2Config:
    decoder = llama_config({"rms_norm_eps": _EPS, **raw}, dtype)
    return Olmo2Config(**vars(decoder), window_rope=decoder.rope)


def olmo3_config(raw: Mapping[str, Any], dtype: torch.dtype) -> Olmo2Config:
    """Reads `rope_scaling` of files before transformers 5, which is for layers without a window."""
    num_layers = required(raw, "num_hidden_layers")
    kinds = ["full_attention" if (layer_idx + 1) % 4 == 0 else "sliding_attention" for layer_idx in range(num_layers)]
    windows = layer_windows(
        {
            **raw,
            "layer_types": raw.get("layer_types") or kinds,
            "use_sliding_window": True,
            "sliding_window": optional(raw, "sliding_window", 4096),
        }
    )
    decoder = llama_config({"rms_norm_eps": _EPS, **raw, "rope_parameters": None, "rope_scaling": None}, dtype)
    rope = {"rope_theta": 500000.0, **raw}
    full = rope_config(rope, "full_attention")
    window = rope_config({**rope, "rope_scaling": None}, "sliding_attention")
    return Olmo2Config(**vars(decoder) | {"sliding_windows": windows, "rope": full}, window_rope=window)


class Olmo2Attention:
    """Queries and keys are normalised as wholes, then split into heads."""

    __slots__ = ("heads", "norms", "o", "qkv", "sizes")

    def __init__(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> None:
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shards = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        heads = heads_of(config, placement)
        rows = {"q_proj": heads.query_rows, "k_proj": heads.key_rows, "v_proj": heads.key_rows}
        self.sizes = tuple(map(len, rows.values()))
        self.qkv = Linear(
            config.hidden_size, shards, placement, bias=config.qkv_bias, rows=None if heads.is_whole else rows
        )
        self.norms = SplitRMSNorms(
            {"q_norm": (q_size, heads.query_rows), "k_norm": (kv_size, heads.key_rows)}, config.rms_norm_eps, placement
        )
        self.heads = head_attention(config, layer_idx, rotary, heads)
        self.o = Linear(
            q_size, {"o_proj": config.hidden_size}, placement, bias=config.attention_output_bias, split=Split.INPUTS
        )

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        qkv = self.qkv(hidden)
        query, key, _ = qkv.split(self.sizes, dim=1)
        self.norms.normalize((query, key))
        return self.o(self.heads(qkv, context))

    def leaves(self) -> Iterator[Leaf]:
        yield self.qkv
        yield from self.norms.leaves()
        yield from self.heads.leaves()
        yield self.o


class Olmo2Layer:
    __slots__ = ("attention", "attention_norm", "mlp", "mlp_norm")

    def __init__(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention = Olmo2Attention(config, layer_idx, rotary, placement.within("self_attn"))
        self.attention_norm = RMSNorm("post_attention_layernorm", size, eps, placement)
        self.mlp = GatedMLP(config, placement.within("mlp"))
        self.mlp_norm = RMSNorm("post_feedforward_layernorm", size, eps, placement)

    def __call__(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        hidden = self.attention(residual.add_(hidden), context)
        self.attention_norm.normalize(hidden)
        hidden = self.mlp(residual.add_(hidden))
        self.mlp_norm.normalize(hidden)
        return hidden

    def leaves(self) -> Iterator[Leaf]:
        yield from self.attention.leaves()
        yield self.attention_norm
        yield from self.mlp.leaves()
        yield self.mlp_norm


class Olmo2Model(DecoderModel):
    layer = Olmo2Layer

    def rotaries(
        self, config: DecoderConfig, max_model_len: int, device: torch.device
    ) -> Sequence[RotaryEmbedding | None]:
        assert isinstance(config, Olmo2Config)
        if not any(config.sliding_windows):
            return [self.rotary] * config.num_layers
        windowed = RotaryEmbedding(config.window_rope, config.head_dim, max_model_len, device)
        return [windowed if window else self.rotary for window in config.sliding_windows]


_GGUF_NAMES = {
    **DECODER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _has_windows(stated: Mapping[str, Any]) -> bool:
    return bool(stated.get("attention.sliding_window"))


def _gguf3_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    rope = keys["rope_parameters"]
    window = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return {"rope_parameters": {"full_attention": rope, "sliding_attention": window}}


_GGUF2 = GgufForm("olmo2", names=_GGUF_NAMES, when=lambda stated: not _has_windows(stated))
_GGUF3 = GgufForm("olmo2", names=_GGUF_NAMES, when=_has_windows, derived_keys=_gguf3_keys)

ARCHITECTURES = (
    Architecture("Olmo2ForCausalLM", "olmo2", olmo2_config, Olmo2Model, _GGUF2),
    Architecture("Olmo3ForCausalLM", "olmo3", olmo3_config, Olmo2Model, _GGUF3),
)

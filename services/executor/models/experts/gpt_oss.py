"""GPT-OSS: experts in every layer, every other layer with a window, and a sink in the attention of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.config.model_config import (
    DecoderConfig,
    decoder_config,
    layer_windows,
    optional,
    required,
)
from pagewire.services.executor.layers.attention.heads import heads_of
from pagewire.services.executor.layers.attention.self_attention import llama_attention
from pagewire.services.executor.layers.attention.sinks import Sinks
from pagewire.services.executor.layers.experts.experts import ClampedSwiglu, ExpertsConfig, RoutedMLP
from pagewire.services.executor.layers.experts.routing import Routing
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.architecture import (
    DECODER_NAMES,
    EXPERTS_NAMES,
    Architecture,
    GgufForm,
    Interleaved,
)
from pagewire.services.executor.models.decoder import Attention, DecoderLayer, DecoderModel, FeedForward


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    experts: ExpertsConfig


def gpt_oss_config(raw: Mapping[str, Any], dtype: torch.dtype) -> GptOssConfig:
    bias, size = raw.get("attention_bias", True), required(raw, "intermediate_size")
    decoder = decoder_config(
        raw,
        dtype,
        head_dim=optional(raw, "head_dim", 64),
        qkv_bias=bias,
        attention_output_bias=bias,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
        sliding_windows=_windows(raw),
    )
    experts = ExpertsConfig(
        num_experts=required(raw, "num_local_experts"),
        hidden_size=decoder.hidden_size,
        intermediate_size=size,
        routing=Routing(
            top_k=required(raw, "num_experts_per_tok"), router="router", bias=True, scoring="softmax_of_chosen"
        ),
        activation=ClampedSwiglu(float(raw.get("swiglu_alpha", 1.702)), float(raw.get("swiglu_limit", 7.0))),
        bias=True,
    )
    return GptOssConfig(**vars(decoder), experts=experts)


def _windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the windows; without `layer_types`, the first layer and every other one have a window."""
    types = raw.get("layer_types") or [
        "full_attention" if layer_idx % 2 else "sliding_attention"
        for layer_idx in range(required(raw, "num_hidden_layers"))
    ]
    window = optional(raw, "sliding_window", 128)
    return layer_windows({**raw, "layer_types": types, "use_sliding_window": True, "sliding_window": window})


class GptOssLayer(DecoderLayer):
    def self_attention(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> Attention:
        sinks = Sinks("sinks", config.num_heads, placement, heads_of(config, placement).queries)
        return llama_attention(config, layer_idx, rotary, placement, sinks=sinks)

    def feed_forward(self, config: DecoderConfig, layer_idx: int, placement: Placement) -> FeedForward:
        assert isinstance(config, GptOssConfig)
        return RoutedMLP(config.experts, placement.within("mlp"))


class GptOssModel(DecoderModel):
    layer = GptOssLayer


def _aliases() -> dict[str, tuple[str, ...] | Interleaved]:
    """Returns the form of checkpoints with one tensor for all experts and alternating rows of gates and ups."""
    projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
    # Dense weights are transposed, MXFP4 has each row's blocks and their scales.
    suffixes = {
        "": ("weight", True),
        "_bias": ("bias", False),
        "_blocks": ("blocks", False),
        "_scales": ("scales", False),
    }
    return {
        f"mlp.experts.{stored}{end}": Interleaved(
            tuple(f"mlp.experts.{{}}.{name}.{suffix}" for name in names), transposed
        )
        for stored, names in projections.items()
        for end, (suffix, transposed) in suffixes.items()
    }


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Adds that YaRN's ramp does not begin and end at whole dimensions, for which llama.cpp has no key."""
    return {"rope_parameters": keys["rope_parameters"] | {"truncate": False}}


_GGUF = GgufForm(
    "gpt-oss",
    names={
        **DECODER_NAMES,
        **EXPERTS_NAMES,
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_inp": "mlp.router",
    },
    derived_keys=_gguf_keys,
)

ARCHITECTURES = (
    Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        gpt_oss_config,
        GptOssModel,
        _GGUF,
        aliases=_aliases(),
        example={"num_local_experts": 8, "intermediate_size": 1024},
    ),
)

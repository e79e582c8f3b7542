"""Qwen2 with experts in place of the feed-forward blocks, and an additional expert for all tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import DecoderConfig, decoder_config, layer_windows, required
from pagewire.services.executor.layers.experts.experts import ExpertsConfig, RoutedMLP
from pagewire.services.executor.layers.experts.routing import Routing
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.sums import JointSum
from pagewire.services.executor.models.architecture import (
    DECODER_NAMES,
    EXPERTS_ALIASES,
    EXPERTS_NAMES,
    Architecture,
    GgufForm,
)
from pagewire.services.executor.models.decoder import DecoderLayer, DecoderModel, FeedForward
from pagewire.services.executor.models.experts.qwen3_moe import num_experts, sparse_layers
from pagewire.services.executor.models.protocol import Leaf


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeConfig(DecoderConfig):
    experts: ExpertsConfig
    sparse_layers: frozenset[int]  # those that have experts
    shared_size: int  # intermediate_size of the shared expert


def qwen2_moe_config(raw: Mapping[str, Any], dtype: torch.dtype) -> Qwen2MoeConfig:
    decoder = decoder_config(raw, dtype, qkv_bias=raw.get("qkv_bias", True), sliding_windows=_windows(raw))
    experts = ExpertsConfig(
        num_experts=num_experts(raw),
        hidden_size=decoder.hidden_size,
        intermediate_size=required(raw, "moe_intermediate_size"),
        routing=Routing(top_k=required(raw, "num_experts_per_tok"), normalize=raw.get("norm_topk_prob", False)),
        activation=decoder.hidden_act,
    )
    return Qwen2MoeConfig(
        **vars(decoder),
        experts=experts,
        sparse_layers=sparse_layers(raw),
        shared_size=required(raw, "shared_expert_intermediate_size"),
    )


def _windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the windows; without `layer_types`, every other layer below `max_window_layers` has the window."""
    if raw.get("layer_types") is not None:
        return layer_windows(raw)
    below = raw.get("max_window_layers", 28)
    types = [
        "full_attention" if i % 2 or i >= below else "sliding_attention"
        for i in range(required(raw, "num_hidden_layers"))
    ]
    return layer_windows({**raw, "layer_types": types})


class SharedExpertMLP:
    """`routed(x) + sigmoid(gate(x)) * shared(x)`"""

    __slots__ = ("gate", "routed", "shared", "sum")

    def __init__(self, config: Qwen2MoeConfig, placement: Placement) -> None:
        self.routed = RoutedMLP(config.experts, placement)
        shared = replace(config, intermediate_size=config.shared_size)
        self.shared = GatedMLP(shared, placement.within("shared_expert"))
        self.gate = Linear(config.hidden_size, {"shared_expert_gate": 1}, placement, bias=False)
        self.sum = JointSum(self.routed, self.shared.down)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        return self.sum(torch.addcmul(self.routed(hidden), self.gate(hidden).sigmoid(), self.shared(hidden)))

    def leaves(self) -> Iterator[Leaf]:
        yield from self.routed.leaves()
        yield from self.shared.leaves()
        yield self.gate


class Qwen2MoeLayer(DecoderLayer):
    def feed_forward(self, config: DecoderConfig, layer_idx: int, placement: Placement) -> FeedForward:
        assert isinstance(config, Qwen2MoeConfig)
        if layer_idx not in config.sparse_layers:
            return super().feed_forward(config, layer_idx, placement)
        return SharedExpertMLP(config, placement.within("mlp"))


class Qwen2MoeModel(DecoderModel):
    layer = Qwen2MoeLayer


_GGUF_NAMES = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}

ARCHITECTURES = (
    Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        qwen2_moe_config,
        Qwen2MoeModel,
        GgufForm("qwen2moe", names=DECODER_NAMES | EXPERTS_NAMES | _GGUF_NAMES),
        aliases=EXPERTS_ALIASES,
    ),
)

"""Qwen3 with experts in place of the feed-forward blocks, or of some of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.services.executor.config.model_config import DecoderConfig, optional, required
from pagewire.services.executor.layers.experts.experts import ExpertsConfig, RoutedMLP
from pagewire.services.executor.layers.experts.routing import Routing
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import (
    DECODER_NAMES,
    EXPERTS_ALIASES,
    EXPERTS_NAMES,
    Architecture,
    GgufForm,
)
from pagewire.services.executor.models.decoder import DecoderLayer, DecoderModel, FeedForward
from pagewire.services.executor.models.dense.qwen3 import qwen3_config


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig):
    experts: ExpertsConfig
    sparse_layers: frozenset[int]  # those that have experts


def qwen3_moe_config(raw: Mapping[str, Any], dtype: torch.dtype) -> Qwen3MoeConfig:
    # Unlike Qwen3's, a window applies to all layers.
    decoder = qwen3_config({**raw, "max_window_layers": 0, "layer_types": None}, dtype)
    experts = ExpertsConfig(
        num_experts=num_experts(raw),
        hidden_size=decoder.hidden_size,
        intermediate_size=required(raw, "moe_intermediate_size"),
        routing=Routing(top_k=required(raw, "num_experts_per_tok"), normalize=raw.get("norm_topk_prob", False)),
        activation=decoder.hidden_act,
    )
    return Qwen3MoeConfig(**vars(decoder), experts=experts, sparse_layers=sparse_layers(raw))


def num_experts(raw: Mapping[str, Any]) -> int:
    """Returns the number of experts, from either of the keys that transformers writes."""
    return required(raw, "num_experts" if "num_experts" in raw else "num_local_experts")


def sparse_layers(raw: Mapping[str, Any]) -> frozenset[int]:
    """Returns the layers with experts: every `decoder_sparse_step`-th except `mlp_only_layers`."""
    step, dense = optional(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    return frozenset(
        layer_idx
        for layer_idx in range(required(raw, "num_hidden_layers"))
        if (layer_idx + 1) % step == 0 and layer_idx not in dense
    )


class Qwen3MoeLayer(DecoderLayer):
    def feed_forward(self, config: DecoderConfig, layer_idx: int, placement: Placement) -> FeedForward:
        assert isinstance(config, Qwen3MoeConfig)
        if layer_idx not in config.sparse_layers:
            return super().feed_forward(config, layer_idx, placement)
        return RoutedMLP(config.experts, placement.within("mlp"))


class Qwen3MoeModel(DecoderModel):
    layer = Qwen3MoeLayer


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    return {"norm_topk_prob": True}  # llama.cpp always does this


ARCHITECTURES = (
    Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        qwen3_moe_config,
        Qwen3MoeModel,
        GgufForm("qwen3moe", names=DECODER_NAMES | EXPERTS_NAMES, derived_keys=_gguf_keys),
        aliases=EXPERTS_ALIASES,
    ),
)

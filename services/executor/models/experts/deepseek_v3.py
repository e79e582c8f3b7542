"""DeepSeek-V3 and R1: V2 with experts chosen by sigmoids, balanced by a bias. Kimi K2 has the same form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from pagewire.services.executor.config.model_config import ModelLoadError, optional, required
from pagewire.services.executor.layers.experts.routing import Routing
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.experts.deepseek_v2 import (
    EXAMPLE,
    DeepseekConfig,
    DeepseekModel,
    deepseek_config,
    gguf_form,
)

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def deepseek_v3_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DeepseekConfig:
    routing = sigmoid_routing(raw, scale=2.5)
    return deepseek_config(raw, dtype, routing, first_sparse_layer=raw.get("first_k_dense_replace", 3))


def sigmoid_routing(raw: Mapping[str, Any], *, scale: float) -> Routing:
    """Returns the routing by sigmoids. scale: factor of the experts' outputs, if no key states it."""
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if raw.get(key, only) != only:
            raise ModelLoadError(f"config key {key}: {raw[key]!r} is not supported, only {only!r} is")
    return Routing(
        top_k=required(raw, "num_experts_per_tok"),
        in_fp32=True,
        scoring="sigmoid",
        normalize=raw.get("norm_topk_prob", True),
        scale=raw.get("routed_scaling_factor", scale),
        num_groups=optional(raw, "n_group", 1),
        topk_groups=optional(raw, "topk_group", 1),
        group_best=2,
        correction_bias="gate.e_score_correction_bias",
    )


def is_behind(name: str, num_layers: int) -> bool:
    """Returns whether a tensor belongs to a drafting layer behind the last one (`mtp.py`)."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= num_layers


class DeepseekV3Model(DeepseekModel):
    def ignored(self, name: str) -> bool:
        return is_behind(name, self.config.num_layers) or super().ignored(name)


ARCHITECTURES = (
    Architecture(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        deepseek_v3_config,
        DeepseekV3Model,
        gguf_form(sigmoid=True, derived_keys=lambda keys: {}),
        example=EXAMPLE,
    ),
)

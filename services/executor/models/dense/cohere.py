"""Command R: parallel attention and feed-forward, norms without bias, rotation of neighbours, scaled logits.

In Command R7B and Command A (Cohere 2) layers with a window rotate, the others do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import (
    ModelLoadError,
    layer_windows,
    optional,
    positive_number,
    required,
)
from pagewire.services.executor.layers.attention.self_attention import llama_attention
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.causal import Layer, ParallelLayer
from pagewire.services.executor.models.layer_norm_model import LayerNormConfig, LayerNormModel, layer_norm_values


@dataclass(frozen=True, kw_only=True)
class CohereConfig(LayerNormConfig):
    logit_scale: float
    rotates: tuple[bool, ...]  # by layer


def cohere_config(raw: Mapping[str, Any], dtype: torch.dtype) -> CohereConfig:
    if raw.get("use_qk_norm"):
        raise ModelLoadError(
            "config key use_qk_norm: norms of queries and keys are not implemented for CohereForCausalLM; use "
            "--model-impl transformers"
        )
    return _config(raw, dtype, rotates=(True,) * required(raw, "num_hidden_layers"))


def cohere2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> CohereConfig:
    num_layers, pattern = required(raw, "num_hidden_layers"), optional(raw, "sliding_window_pattern", 4)
    kinds = ["sliding_attention" if (layer_idx + 1) % pattern else "full_attention" for layer_idx in range(num_layers)]
    windows = layer_windows(
        {
            **raw,
            "layer_types": raw.get("layer_types") or kinds,
            "use_sliding_window": True,
            "sliding_window": optional(raw, "sliding_window", 4096),
        }
    )
    return _config(raw, dtype, rotates=tuple(window > 0 for window in windows), sliding_windows=windows)


def _config(raw: Mapping[str, Any], dtype: torch.dtype, *, rotates: tuple[bool, ...], **family: Any) -> CohereConfig:
    bias = raw.get("attention_bias", False)
    values = layer_norm_values(
        {"tie_word_embeddings": True, **raw}, dtype, qkv_bias=bias, attention_output_bias=bias, **family
    )
    return CohereConfig(**values, logit_scale=positive_number(raw, "logit_scale", 0.0625), rotates=rotates)


class CohereModel(LayerNormModel):
    norm_has_bias = False
    config: CohereConfig

    def layer(self, layer_idx: int, placement: Placement) -> Layer:
        config = self.config
        rotary = self.rotary if config.rotates[layer_idx] else None
        return ParallelLayer(
            self.layer_norm("input_layernorm", placement),
            llama_attention(config, layer_idx, rotary, placement.within("self_attn"), rotates_neighbours=True),
            GatedMLP(config, placement.within("mlp")),
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return super().compute_logits(hidden).mul_(self.config.logit_scale)


_GGUF_NUMBERS = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}

ARCHITECTURES = (
    Architecture(
        "CohereForCausalLM", "cohere", cohere_config, CohereModel, GgufForm("command-r", numbers=_GGUF_NUMBERS)
    ),
    Architecture(
        "Cohere2ForCausalLM", "cohere2", cohere2_config, CohereModel, GgufForm("cohere2", numbers=_GGUF_NUMBERS)
    ),
)

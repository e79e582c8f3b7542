"""Gemma 3: five layers with a window and a separate rotary base, then one with full attention, and so on.

Queries and keys are normalised per head. Of a checkpoint with vision (Gemma3ForConditionalGeneration), only the text
model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.config.rope_config import RopeConfig, layer_parameters, rope_config
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.dense.gemma2 import (
    GEMMA_NAMES,
    GemmaConfig,
    GemmaModel,
    gemma_query_scalar,
    gemma_values,
)

_VISION = ("vision_tower.", "multi_modal_projector.")


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(GemmaConfig):
    """`rope` is that of the layers without a window."""

    local_rope: RopeConfig
    text_prefix: str  # of the text model's names in the checkpoint

    @property
    def max_supported_len(self) -> int:
        """Returns `max_position_embeddings`, which already includes position scaling."""
        return self.max_position_embeddings


class Gemma3Model(GemmaModel):
    config: Gemma3Config

    def __init__(self, config: Gemma3Config, max_model_len: int, placement: Placement) -> None:
        everywhere = RotaryEmbedding(config.rope, config.head_dim, max_model_len, placement.device)
        nearby = RotaryEmbedding(config.local_rope, config.head_dim, max_model_len, placement.device)
        rotary = [nearby if window else everywhere for window in config.sliding_windows]
        super().__init__(config, rotary, replace(placement, prefix=config.text_prefix))

    def ignored(self, name: str) -> bool:
        sees = bool(self.config.text_prefix) and name.startswith(_VISION)
        return sees or super().ignored(name)


# Defaults of transformers' Gemma3TextConfig, as published files omit keys.
_DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "max_position_embeddings": 131072,
}


def gemma3_config(raw: Mapping[str, Any], dtype: torch.dtype, text_prefix: str = "") -> Gemma3Config:
    raw = _DEFAULTS | dict(raw)
    full, local = _ropes(raw)
    values = gemma_values(
        raw | {"rope_parameters": full}, dtype, full_attention_every=raw.get("sliding_window_pattern", 6)
    )
    local_rope = rope_config({"rope_parameters": local})
    return Gemma3Config(**values, qk_norm=True, local_rope=local_rope, text_prefix=text_prefix)


def gemma3_text_config(raw: Mapping[str, Any], dtype: torch.dtype) -> Gemma3Config:
    """Reads a config.json with the keys of a Gemma3ForCausalLM in its `text_config`."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelLoadError(f"config key text_config: expected the keys of the language model, found {text!r:.60}")
    shared = {key: raw[key] for key in ("architectures", "eos_token_id", "tie_word_embeddings") if key in raw}
    return gemma3_config({**text, **shared}, dtype, text_prefix="language_model.")


def _ropes(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns rope_parameters of layers without and with a window, from transformers 5's keys or the older ones."""
    full = {"rope_theta": raw.get("rope_theta") or 1e6, **(raw.get("rope_scaling") or {})}
    local = {"rope_theta": raw.get("rope_local_base_freq") or 1e4}
    return full | layer_parameters(raw, "full_attention"), local | layer_parameters(raw, "sliding_attention")


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": gemma_query_scalar(keys, layers_of_27b=62),
        "rope_parameters": {"full_attention": keys["rope_parameters"]},
    }


ARCHITECTURES = (
    Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        gemma3_config,
        Gemma3Model,
        GgufForm(
            "gemma3",
            names=GEMMA_NAMES,
            norms_with_one=True,
            numbers={
                "rope.freq_base_swa": "rope_local_base_freq",
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            derived_keys=_gguf_keys,
        ),
    ),
    Architecture(
        "Gemma3ForConditionalGeneration", "gemma3", gemma3_text_config, Gemma3Model, base="language_model.model."
    ),
)

"""LLaVA: CLIP's or SigLIP's vision tower, a projector of two layers, and Llama, Mistral or Qwen as the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from pagewire.services.executor.config.model_config import ModelLoadError, required
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.vision.image_forms import OneSize
from pagewire.services.executor.models.vision.vision_language import (
    VisionLanguageConfig,
    VisionLanguageModel,
    any_text_config,
    complete,
    image_token_id,
    vision_language_config,
)

_TOWERS = {"clip_vision_model": 1, "siglip_vision_model": 0}  # tokens in addition to patches: CLIP's class
_FIRST_TOKEN = {"default": -1, "full": 0}  # whether the tower's first token is dropped


def llava_config(raw: Mapping[str, Any], dtype: torch.dtype) -> VisionLanguageConfig:
    full = complete(raw)
    token_id = image_token_id(full, "image_token_id", "image_token_index")
    return vision_language_config(raw, any_text_config(raw, full, dtype), token_id, _image_form(full))


def _image_form(full: Mapping[str, Any]) -> OneSize:
    vision = full["vision_config"]
    kind, strategy = vision.get("model_type"), full.get("vision_feature_select_strategy")
    if kind not in _TOWERS:
        raise ModelLoadError(f"config key vision_config.model_type: {kind!r} is not one of {', '.join(_TOWERS)}")
    if strategy not in _FIRST_TOKEN:
        raise ModelLoadError(
            f"config key vision_feature_select_strategy: {strategy!r} is not one of {', '.join(_FIRST_TOKEN)}"
        )
    side = required(vision, "image_size")
    tokens = (side // required(vision, "patch_size")) ** 2 + _TOWERS[kind] + _FIRST_TOKEN[strategy]
    return OneSize((1, required(vision, "num_channels"), side, side), tokens)


LlavaModel = partial(
    VisionLanguageModel,
    vision_names={"vision_tower": "vision_tower", "multi_modal_projector": "multi_modal_projector"},
    body_name="language_model.model",
    head_name="language_model.lm_head",
)

_PREFIXES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
    "vision_tower.vision_model.": "vision_tower.",
}

ARCHITECTURES = (
    Architecture(
        "LlavaForConditionalGeneration",
        "llava",
        llava_config,
        LlavaModel,
        base="language_model.model.",
        prefixes=_PREFIXES,
        has_parts=True,
        example={"image_token_index": 1},
    ),
)

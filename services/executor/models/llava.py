"""LLaVA: CLIP's or SigLIP's vision tower, a projector of two layers, and Llama, Mistral or Qwen as the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.vision_language import (
    VisionLanguageConfig,
    VisionLanguageModel,
    any_text_config,
    complete,
    image_token_id,
    vision_language_config,
)


def llava_config(raw: Mapping[str, Any], dtype: torch.dtype) -> VisionLanguageConfig:
    full = complete(raw)
    token_id = image_token_id(full, "image_token_id", "image_token_index")
    return vision_language_config(raw, any_text_config(raw, full, dtype), token_id)


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
        prefixes=_PREFIXES,
        has_parts=True,
        example={"image_token_index": 1},
    ),
)

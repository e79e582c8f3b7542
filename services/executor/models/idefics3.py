"""Idefics3 and SmolVLM: SigLIP's vision tower on tiles of an image, pixel shuffle, and Llama as the decoder."""

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


def idefics3_config(raw: Mapping[str, Any], dtype: torch.dtype) -> VisionLanguageConfig:
    full = complete(raw)
    return vision_language_config(raw, any_text_config(raw, full, dtype), image_token_id(full, "image_token_id"))


Idefics3Model = partial(
    VisionLanguageModel,
    vision_names={"vision_model": "model.vision_model", "connector": "model.connector"},
    body_name="model.text_model",
)

_DETAILS: dict[str, Any] = {"has_parts": True, "example": {"image_token_id": 1}}

ARCHITECTURES = (
    Architecture("Idefics3ForConditionalGeneration", "idefics3", idefics3_config, Idefics3Model, **_DETAILS),
    Architecture("SmolVLMForConditionalGeneration", "smolvlm", idefics3_config, Idefics3Model, **_DETAILS),
)

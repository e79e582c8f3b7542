"""Idefics3 and SmolVLM: SigLIP's vision tower on tiles of an image, pixel shuffle, and Llama as the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError, required
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.vision.image_forms import PIXELS, Tiles
from pagewire.services.executor.models.vision.vision_language import (
    VisionLanguageConfig,
    VisionLanguageModel,
    any_text_config,
    complete,
    image_token_id,
    vision_language_config,
)

_ALMOST_ZERO = 1e-6  # not zero in half precision either


def idefics3_config(raw: Mapping[str, Any], dtype: torch.dtype) -> VisionLanguageConfig:
    full = complete(raw)
    vision = full["vision_config"]
    form = Tiles(
        num_channels=required(vision, "num_channels"),
        max_side=required(vision, "image_size"),
        token_side=required(vision, "patch_size") * required(full, "scale_factor"),
    )
    if form.max_side < form.token_side:
        raise ModelLoadError(
            f"config key vision_config.image_size: {form.max_side} pixels are less than a token has, {form.token_side} "
            "(patch_size * scale_factor)"
        )
    return vision_language_config(raw, any_text_config(raw, full, dtype), image_token_id(full, "image_token_id"), form)


class _TiledModel(VisionLanguageModel):
    def embed_image(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One image's tensors, by the names that transformers gives them -> [num_placeholders, hidden_size]"""
        pixels = tensors[PIXELS].clone()
        corners = pixels[..., 0, 0, 0]
        # transformers treats an all-zero tile as padding and drops it.
        corners.masked_fill_(corners == 0, _ALMOST_ZERO)
        return super().embed_image({PIXELS: pixels})


Idefics3Model = partial(
    _TiledModel,
    vision_names={"vision_model": "model.vision_model", "connector": "model.connector"},
    body_name="model.text_model",
)

_DETAILS: dict[str, Any] = {"has_parts": True, "example": {"image_token_id": 1}}

ARCHITECTURES = (
    Architecture("Idefics3ForConditionalGeneration", "idefics3", idefics3_config, Idefics3Model, **_DETAILS),
    Architecture("SmolVLMForConditionalGeneration", "smolvlm", idefics3_config, Idefics3Model, **_DETAILS),
)

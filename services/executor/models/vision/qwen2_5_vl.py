"""Qwen2-VL and Qwen2.5-VL: a vision tower for images of any size, and Qwen2 with image tokens that rotate by three
axes.

M-RoPE (Wang et al. 2024, Qwen2-VL): each pair of a head's dimensions belongs to time, height or width. A text token has
the same position on all three, so it rotates as in Qwen2; a token of an image has its place in the grid. An image
counts as many positions as its longer side, fewer than its tokens, so all that follows is shifted by a constant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError, required
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.dense.qwen2 import qwen2_config
from pagewire.services.executor.models.vision.image_forms import Patches
from pagewire.services.executor.models.vision.vision_language import (
    VisionLanguageConfig,
    VisionLanguageModel,
    complete,
    image_token_id,
    vision_language_config,
)
from pagewire.services.executor.step.step import Image
from pagewire.services.executor.step.step_context import StepContext, StepImages


@dataclass(frozen=True, kw_only=True)
class Qwen25VLConfig(VisionLanguageConfig):
    mrope_section: tuple[int, int, int]  # pairs of dimensions that rotate by time, height and width
    image_form: Patches


def qwen2_5_vl_config(raw: Mapping[str, Any], dtype: torch.dtype) -> Qwen25VLConfig:
    full = complete(raw)
    text: dict[str, Any] = full["text_config"] | {"architectures": raw["architectures"]}
    text["tie_word_embeddings"] = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    rope = dict(text.get("rope_parameters") or {})
    section = tuple(rope.pop("mrope_section", (16, 24, 24)))
    vision = full["vision_config"]
    sizes = [required(vision, key) for key in ("in_channels", "temporal_patch_size", "patch_size", "patch_size")]
    form = Patches(math.prod(sizes), required(vision, "spatial_merge_size"))
    config = vision_language_config(
        raw, qwen2_config(text | {"rope_parameters": rope}, dtype), image_token_id(full, "image_token_id"), form
    )
    if len(section) != 3 or sum(section) * 2 != config.text.head_dim:
        raise ModelLoadError(
            f"config key mrope_section: {list(section)} must be three numbers with a sum of half of head_dim "
            f"{config.text.head_dim}"
        )
    return Qwen25VLConfig(
        **{name: getattr(config, name) for name in config.__dataclass_fields__},
        mrope_section=section,
    )


class Qwen25VLModel(VisionLanguageModel):
    config: Qwen25VLConfig

    def __init__(self, config: Qwen25VLConfig, max_model_len: int, placement: Placement) -> None:
        super().__init__(config, max_model_len, placement, vision_names={"visual": "visual"}, body_name="model")
        axis_of_pair = torch.arange(3).repeat_interleave(torch.tensor(config.mrope_section))
        # int64 [head_dim]: which axis a column of the rotary table, cosines and then sines, belongs to
        self._axis = axis_of_pair.repeat(2).to(placement.device)

    def image_positions(self, images: Sequence[Image]) -> tuple[np.ndarray, int]:
        """Returns int64 [3, n], the time, height and width of all tokens up to the last one of an image, and the delta
        of the tokens behind it."""
        pieces, position, num_tokens = [np.empty((3, 0), dtype=np.int64)], 0, 0
        for image in images:
            num_text = image.offset - num_tokens
            pieces.append(np.tile(np.arange(position, position + num_text), (3, 1)))
            position += num_text
            merge = self.config.image_form.merge_size
            time, height, width = image.tensors["image_grid_thw"].reshape(3) // [1, merge, merge]
            pieces.append(np.indices((time, height, width)).reshape(3, -1) + position)
            position += int(max(height, width))
            num_tokens = image.offset + image.num_tokens
        return np.concatenate(pieces, axis=1), position - num_tokens

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        return super().forward(input_ids, self._with_rope_positions(context))

    def _with_rope_positions(self, context: StepContext) -> StepContext:
        if context.position_deltas is None:
            return context
        tokens = torch.arange(len(context.positions), device=context.positions.device)
        request = torch.searchsorted(context.query_start_loc[1:], tokens.int(), right=True)
        request = request.clamp(max=len(context.rows) - 1)
        rows = context.rows[request].clamp(min=0)  # padding may rotate by any value
        positions = (context.positions + context.position_deltas[rows]).clamp(min=0)
        if context.images is None or context.images.rope_positions is None:
            return replace(context, positions=positions)
        return replace(context, positions=tokens, rope_table=self._rope_table(positions, context.images))

    def _rope_table(self, positions: Tensor, images: StepImages) -> Tensor:
        """Returns fp32 [num_tokens, head_dim], a row of the table for each token. positions [num_tokens]: of text."""
        assert images.rope_tokens is not None and images.rope_positions is not None
        by_axis = positions.repeat(3, 1).index_copy_(1, images.rope_tokens, images.rope_positions)
        rows = self.text.rotary.cos_sin_cache[by_axis]  # [3, num_tokens, head_dim]
        return rows.gather(0, self._axis.expand(1, len(positions), -1))[0]


_DETAILS: dict[str, Any] = {
    "prefixes": {"model.language_model.": "model.", "model.visual.": "visual."},
    "has_parts": True,
    "example": {
        "image_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    },
}

ARCHITECTURES = (
    Architecture("Qwen2VLForConditionalGeneration", "qwen2_vl", qwen2_5_vl_config, Qwen25VLModel, **_DETAILS),
    Architecture("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", qwen2_5_vl_config, Qwen25VLModel, **_DETAILS),
)

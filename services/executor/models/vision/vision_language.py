"""The common part of models that read images: a vision tower in front of one of our decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import DecoderConfig, ModelConfig, ModelLoadError, required
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.vision_tower import VisionTower
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.dense.llama import llama_config, mistral_config
from pagewire.services.executor.models.dense.qwen2 import qwen2_config
from pagewire.services.executor.models.dense.qwen3 import qwen3_config
from pagewire.services.executor.models.protocol import Leaf, OwnModel
from pagewire.services.executor.models.vision.image_forms import ImageForm
from pagewire.services.executor.step.step_context import StepContext

# text_config's model_type -> the function that reads it
_TEXT_CONFIGS: Mapping[str, Callable[[Mapping[str, Any], torch.dtype], DecoderConfig]] = {
    "llama": llama_config,
    "mistral": mistral_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
}


@dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig(ModelConfig):
    """`raw` is the whole config.json, from which transformers makes the vision tower."""

    text: DecoderConfig
    image_token_id: int
    image_form: ImageForm
    raw: Mapping[str, Any]

    @property
    def max_supported_len(self) -> int:
        return self.text.max_supported_len

    def untied(self) -> Self:
        return replace(self, text=self.text.untied())


def complete(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config.json with the defaults that its writer omitted, in transformers' current layout.

    The text_config of many checkpoints states only the differences from the first Llama.
    """
    from transformers import AutoConfig

    try:
        full: dict[str, Any] = AutoConfig.for_model(**deepcopy(dict(raw))).to_dict()  # it modifies its keywords
    except Exception as error:  # its classes may raise anything
        raise ModelLoadError(f"transformers does not take this config: {error}") from error
    return full


def vision_language_config(
    raw: Mapping[str, Any], text: DecoderConfig, image_token_id: int, image_form: ImageForm
) -> VisionLanguageConfig:
    if not 0 <= image_token_id < text.vocab_size:
        raise ModelLoadError(
            f"the image token {image_token_id} is outside the vocabulary of {text.vocab_size}; use the config.json "
            "that belongs to the checkpoint"
        )
    return VisionLanguageConfig(
        architecture=raw["architectures"][0],
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position_embeddings=text.max_position_embeddings,
        dtype=text.dtype,
        eos_token_ids=text.eos_token_ids,
        text=text,
        image_token_id=image_token_id,
        image_form=image_form,
        raw=raw,
    )


def any_text_config(raw: Mapping[str, Any], full: Mapping[str, Any], dtype: torch.dtype) -> DecoderConfig:
    """Returns the decoder's config, which may be any of ours. full: `complete(raw)`."""
    text = full["text_config"]
    kind = text.get("model_type")
    if kind not in _TEXT_CONFIGS:
        raise ModelLoadError(f"config key text_config.model_type: {kind!r} is not one of {', '.join(_TEXT_CONFIGS)}")
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    stated = {"architectures": raw["architectures"], "tie_word_embeddings": bool(tied)}
    return _TEXT_CONFIGS[kind](text | stated, dtype)


def image_token_id(full: Mapping[str, Any], *keys: str) -> int:
    """Returns the value of the first existing key."""
    key = next((key for key in keys if full.get(key) is not None), keys[0])
    return required(full, key)


class VisionLanguageModel(OwnModel):
    """A decoder in which embeddings of images replace those of placeholder tokens before the first layer."""

    config: VisionLanguageConfig

    def __init__(
        self,
        config: VisionLanguageConfig,
        max_model_len: int,
        placement: Placement,
        *,
        vision_names: Mapping[str, str],
        body_name: str,
        head_name: str = "lm_head",
    ) -> None:
        """vision_names: see `VisionTower`. body_name, head_name: see `DecoderModel`."""
        self.config = config
        self.vision = VisionTower(config.raw, vision_names, placement.dtype, placement.device)
        self.text = DecoderModel(config.text, max_model_len, placement, body_name=body_name, head_name=head_name)

    @property
    def image_token_id(self) -> int:
        return self.config.image_token_id

    @property
    def image_form(self) -> ImageForm:
        return self.config.image_form

    def embed_image(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """One image's tensors, by the names that transformers gives them -> [num_placeholders, hidden_size]"""
        return self.vision(tensors)

    def leaves(self) -> Iterator[Leaf]:
        yield self.vision
        yield from self.text.leaves()

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        hidden = self.text.embed(input_ids)
        if context.images is not None:
            hidden = context.images.merge(hidden)
        return self.text.decode(hidden, context)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.text.compute_logits(hidden)

    def ignored(self, name: str) -> bool:
        return self.text.ignored(name) or name.endswith("embeddings.position_ids")

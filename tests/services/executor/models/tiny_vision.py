"""Tiny random models that read images, as transformers saves them, and prompts for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from pagewire.services.executor.step.step import Image

IMAGE_TOKEN = 90
_TEXT: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.4,
}


def llava_config(tower: str = "clip_vision_model", text: str = "llama", **text_options: Any) -> Any:
    strategy: Any = "default" if tower == "clip_vision_model" else "full"
    return transformers.LlavaConfig(
        vision_config={"model_type": tower, "projection_dim": 16} | _VISION,
        text_config={"model_type": text} | _TEXT | text_options,
        image_token_index=IMAGE_TOKEN,
        vision_feature_select_strategy=strategy,
    )


def idefics3_config(family: str = "Idefics3") -> Any:
    return getattr(transformers, f"{family}Config")(
        vision_config=_VISION | {"patch_size": 7},
        text_config={"model_type": "llama"} | _TEXT,
        image_token_id=IMAGE_TOKEN,
        scale_factor=2,
    )


def qwen2_vl_config(family: str = "Qwen2VL", **vision: Any) -> Any:
    return getattr(transformers, f"{family}Config")(
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": 4,
            "initializer_range": 0.4,
        }
        | vision,
        text_config=_TEXT
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 100.0}},
        image_token_id=IMAGE_TOKEN,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )


def qwen2_5_vl_config() -> Any:
    windows = {"window_size": 16, "fullatt_block_indexes": [1]}
    return qwen2_vl_config("Qwen2_5_VL", intermediate_size=48, out_hidden_size=32, **windows)


def save_tiny_vision(path: Path, config: Any) -> PreTrainedModel:
    """Saves a random model and returns it, in fp32 with eager attention."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
        elif "language" not in name and "text_model" not in name and "lm_head" not in name:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    model.save_pretrained(path)
    return model


def tensors(config: Any, seed: int, size: Sequence[int] = (4, 6)) -> dict[str, np.ndarray]:
    """Returns the tensors of one random image as the model's processor makes them; `size` is (height, width) in
    patches, for Qwen's models."""
    rng = np.random.default_rng(seed)
    if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        num_patches, pixels = size[0] * size[1], 3 * 2 * config.vision_config.patch_size**2
        return {
            "pixel_values": rng.normal(size=(num_patches, pixels)).astype(np.float32),
            "image_grid_thw": np.array([[1, *size]]),
        }
    if config.model_type == "llava":
        return {"pixel_values": rng.normal(size=(1, 3, 28, 28)).astype(np.float32)}
    return {"pixel_values": rng.normal(size=(1, 2, 3, 28, 28)).astype(np.float32)}  # two tiles


def num_placeholders(config: Any, image: Mapping[str, np.ndarray]) -> int:
    if config.model_type in ("qwen2_vl", "qwen2_5_vl"):
        return int(image["image_grid_thw"].prod()) // 4
    return 4 if config.model_type == "llava" else 2 * 4


class ImagePrompt:
    """Token ids with placeholders, and their images."""

    def __init__(self, config: Any, *parts: Sequence[int] | Mapping[str, np.ndarray]) -> None:
        self.token_ids: list[int] = []
        self.images: list[Image] = []
        for part in parts:
            if isinstance(part, Mapping):
                count = num_placeholders(config, part)
                content = b"".join(tensor.tobytes() for tensor in part.values())
                self.images.append(Image(content, len(self.token_ids), count, part))
                self.token_ids += [IMAGE_TOKEN] * count
            else:
                self.token_ids += part

    def inputs(self, model: Any) -> dict[str, torch.Tensor]:
        """Returns the inputs of transformers' model."""
        inputs: dict[str, torch.Tensor] = {}
        for name in self.images[0].tensors if self.images else ():
            axis = 1 if self.images[0].tensors[name].ndim == 5 else 0
            stacked = np.concatenate([image.tensors[name] for image in self.images], axis=axis)
            inputs[name] = torch.from_numpy(stacked)
        input_ids = torch.tensor([self.token_ids])
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (input_ids == IMAGE_TOKEN).int()
            model.model.rope_deltas = None
        return inputs | {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}

    @torch.inference_mode()
    def expected(self, model: Any, num_tokens: int) -> list[int]:
        """Returns the tokens that transformers generates greedily."""
        output = model.generate(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0, **self.inputs(model)
        )
        return output[0, len(self.token_ids) :].tolist()

    @torch.inference_mode()
    def expected_logprobs(self, model: Any) -> torch.Tensor:
        """Returns transformers' log probabilities of its tokens from the second on, placeholders included."""
        logprobs = model(**self.inputs(model)).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(self.token_ids[1:])[:, None])[:, 0]

"""Tiny random models that read images, whole: weights, tokenizer, chat template and image processor on disk."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessorPil, Idefics3ImageProcessorPil, Qwen2VLImageProcessorPil

from tests.services.executor.models import tiny_vision
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

IMAGE_TOKENS = {"llava": "<image>", "idefics3": "<image>", "qwen2_5_vl": "<|image_pad|>"}
_FRAMES = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<|vision_start|>", "<|vision_end|>"]
_TILES = [f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)]
_VOCAB_SIZE = 480

# As templates of such models are written: parts in their order.
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


def save_vision_checkpoint(path: Path, family: str) -> Any:
    """Saves a tiny checkpoint of a family of IMAGE_TOKENS; returns transformers' model."""
    token = IMAGE_TOKENS[family]
    shown = f"<|vision_start|>{token}<|vision_end|>" if family == "qwen2_5_vl" else token
    added = [token, *_FRAMES, *_TILES]
    save_byte_level(path, chat_template=_TEMPLATE.replace("IMAGE", shown), extra_special_tokens=added)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": added})
    tokenizer.save_pretrained(path)
    config = getattr(tiny_vision, f"{family}_config")()
    config.text_config.vocab_size, config.text_config.max_position_embeddings = _VOCAB_SIZE, 512
    config.image_token_id = tokenizer.convert_tokens_to_ids(token)
    model = tiny_vision.save_tiny_vision(path, config)
    image_processor(family).save_pretrained(path)
    return model


def image_processor(family: str) -> Any:
    if family == "llava":
        return CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    if family == "qwen2_5_vl":
        size = {"shortest_edge": 64, "longest_edge": 1024}
        return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    return Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})


def picture(seed: int, width: int = 40, height: int = 24, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def data_uri(image: Image.Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"

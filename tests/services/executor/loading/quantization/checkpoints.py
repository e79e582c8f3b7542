"""Tiny quantized models on disk, and the same with dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from pagewire.services.executor.layers.weight_format import WeightFormat
from tests.services.executor.models.test_models import assert_same_logits, load, save_tiny

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OTHERS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "qkv_proj", "gate_up_proj")

# (module's name, weight [N, K]) -> the tensors that replace it, by suffix, and what they stand for; None: stays dense
Packer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]


def save_quantized(
    path: Path, config: Mapping[str, Any], packer: Packer, *, family: str = "Llama", **overrides: Any
) -> PreTrainedModel:
    """Saves a tiny model of which `packer` stored the linear layers; returns it with the weights that it stored."""
    model = save_tiny(path, family, **({"hidden_size": 96, "intermediate_size": 160} | overrides))
    tensors = load_file(path / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in LINEAR + OTHERS or (packed := packer(module, tensors[name])) is None:
            continue
        del tensors[name]
        tensors |= {f"{module}.{suffix}": tensor.contiguous().clone() for suffix, tensor in packed[0].items()}
        parameters[name].data.copy_(packed[1])
    save_file(tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return model


def assert_loads_as(path: Path, expected: PreTrainedModel) -> None:
    """The loaded model has the logits of the one with dequantized weights."""
    assert_same_logits(load(path), expected)


def assert_fits(
    weight_format: WeightFormat, tensors: Mapping[str, Tensor], out_features: int, in_features: int
) -> None:
    """The tensors are those that the format asks for."""
    specs = weight_format.tensors(out_features, in_features)
    assert {suffix for suffix, spec in specs.items() if not spec.optional} <= set(tensors) <= set(specs)
    for suffix, tensor in tensors.items():
        assert specs[suffix].fits(tuple(tensor.shape)), suffix
        assert tensor.dtype in specs[suffix].dtypes, suffix


def random_words(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.int32) -> Tensor:
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max + 1, shape, dtype=dtype, generator=generator)


def random_scales(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + 1)).mul_(0.1).add_(0.01).to(dtype)


def field(word: int | Tensor, index: int, bits: int) -> int:
    """Unsigned integer number `index` of a word, the lowest bits being number 0."""
    return (int(word) >> (index * bits)) & (2**bits - 1)


def put(fields: list[int], bits: int, dtype: torch.dtype = torch.int32) -> int:
    """The word that holds these numbers, as a signed integer."""
    word = sum(value << (index * bits) for index, value in enumerate(fields))
    size = torch.iinfo(dtype).bits
    return word - (1 << size) if word >= 1 << (size - 1) else word

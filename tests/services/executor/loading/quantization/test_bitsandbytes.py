"""Checkpoints of bitsandbytes against a decoder written element by element.

The reader was also compared once with bitsandbytes 0.50: of `quantize_4bit` (nf4 and fp4, with and without nested
scales, blocks of 64, 128 and 256) and `int8_vectorwise_quant` it reads what the library's own reference dequantizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import WeightFormat
from pagewire.services.executor.loading.quantization.registry import quantization_of
from tests.services.executor.loading.quantization.checkpoints import (
    assert_fits,
    assert_loads_as,
    random_words,
    save_quantized,
)
from tests.sweep import examples

NF4: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}
STATE = "weight.quant_state.bitsandbytes__nf4"


def format_of(config: dict[str, Any] = NF4, **changes: Any) -> WeightFormat:
    found = quantization_of(config | changes, None).format("model.layers.0.mlp.up_proj")
    assert found is not None
    return found


def state_of(shape: list[int], **changes: Any) -> Tensor:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape} | changes
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def random_tensors(num_outputs: int, num_inputs: int, block_size: int, nested: bool, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    num_blocks = -(-num_outputs * num_inputs // block_size)
    tensors = {
        "weight": random_words((-(-num_outputs * num_inputs // 2), 1), seed, torch.uint8),
        "weight.quant_map": torch.randn(16),
        "weight.absmax": torch.rand(num_blocks),
        STATE: state_of([num_outputs, num_inputs], blocksize=block_size),
    }
    if nested:
        state = {"nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.625}
        tensors |= {
            "weight.absmax": random_words((num_blocks,), seed, torch.uint8),
            "weight.nested_absmax": torch.rand(-(-num_blocks // 4)),
            "weight.nested_quant_map": torch.randn(256),
            STATE: state_of([num_outputs, num_inputs], blocksize=block_size, **state),
        }
    return tensors


@settings(max_examples=examples(25), deadline=None)
@given(
    num_outputs=st.integers(1, 12),
    num_inputs=st.integers(1, 8).map(lambda parts: 16 * parts),
    block_size=st.sampled_from([32, 64, 128]),
    nested=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_four_bits(num_outputs: int, num_inputs: int, block_size: int, nested: bool, seed: int) -> None:
    """Blocks are of the flattened weight, whatever its rows; the last may be smaller."""
    tensors = random_tensors(num_outputs, num_inputs, block_size, nested, seed)
    weight_format = format_of()
    assert_fits(weight_format, tensors, num_outputs, num_inputs)
    weight = weight_format.read(tensors, num_outputs, num_inputs).dequantize()
    for n in range(num_outputs):
        for k in range(num_inputs):
            index = n * num_inputs + k
            byte, block = int(tensors["weight"][index // 2]), index // block_size
            scale = tensors["weight.absmax"][block]
            if nested:
                scale = (
                    tensors["weight.nested_quant_map"][int(scale)] * tensors["weight.nested_absmax"][block // 4] + 0.625
                )
            code = byte & 15 if index % 2 else byte >> 4
            assert weight[n, k] == tensors["weight.quant_map"][code] * scale


def pack_nf4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codebook = torch.linspace(-1, 1, 16)
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1)
    codes = (blocks / scales[:, None] - codebook[:, None, None]).abs().argmin(0)
    flat = codes.flatten().to(torch.uint8)
    tensors = {
        "weight": (flat[::2] << 4 | flat[1::2])[:, None],
        "weight.quant_map": codebook,
        "weight.absmax": scales,
        STATE: state_of(list(weight.shape)),
    }
    return tensors, (codebook[codes] * scales[:, None]).view_as(weight)


def pack_int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round()
    tensors = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * largest[:, None] / 127


def test_four_bit_model(tmp_path: Path) -> None:
    """Rows of 96 inputs: every second one begins within a block."""
    assert_loads_as(tmp_path, save_quantized(tmp_path, NF4, lambda _, weight: pack_nf4(weight)))


def test_int8_model(tmp_path: Path) -> None:
    assert_loads_as(
        tmp_path, save_quantized(tmp_path, INT8, lambda name, w: None if "layers.1.mlp" in name else pack_int8(w))
    )


def test_modules_that_stay_dense() -> None:
    found = quantization_of(INT8 | {"llm_int8_skip_modules": ["down_proj"]}, None)
    assert found.format("model.layers.0.mlp.down_proj") is None
    assert found.format("model.layers.0.mlp.up_proj") is not None
    assert found.format("lm_head") is None
    assert quantization_of(NF4, {"a.up_proj.weight"}).format("a.up_proj") is None
    assert quantization_of(NF4, {"a.up_proj.weight", "a.up_proj.weight.absmax"}).format("a.up_proj") is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"load_in_4bit and load_in_8bit: one of both must be true"),
        (NF4 | {"load_in_8bit": True}, r"one of both must be true"),
        (
            NF4 | {"bnb_4bit_quant_type": "int4"},
            r"bnb_4bit_quant_type: 'int4' is not supported, expected 'nf4' or 'fp4'",
        ),
    ],
)
def test_config_that_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        quantization_of(config, None)


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        (STATE, torch.tensor([91, 255], dtype=torch.uint8), r"quant_state\.bitsandbytes__nf4: cannot be read as JSON"),
        (STATE, torch.full((100_000,), 91, dtype=torch.uint8), r"cannot be read as JSON"),
        (STATE, state_of([96, 8]), r"expected an object with quant_type 'nf4' and shape \[8, 96\]"),
        (STATE, state_of([8, 96], quant_type="fp4"), r"expected an object with quant_type 'nf4'"),
        (STATE, state_of([8, 96], blocksize=0), r"key blocksize: expected a positive integer, found 0"),
        (STATE, state_of([8, 96], blocksize=8), r"weight: rows of 96 cannot be cut into blocks of 8 or equal parts"),
        ("weight.absmax", torch.ones(11), r"weight\.absmax: expected 12 scales, found 11"),
        ("weight.absmax", torch.full((12,), torch.nan), r"weight\.absmax: has values that are not finite"),
        ("weight.absmax", torch.ones(12, dtype=torch.uint8), r"weight\.nested_absmax: is missing"),
    ],
)
def test_values_that_are_refused(suffix: str, tensor: Tensor, message: str) -> None:
    tensors = random_tensors(8, 96, 64, nested=False, seed=0) | {suffix: tensor}
    with pytest.raises(ModelLoadError, match=message):
        format_of().read(tensors, 8, 96)


def test_nested_scales_that_do_not_fit() -> None:
    tensors = random_tensors(8, 96, 64, nested=True, seed=0) | {"weight.nested_absmax": torch.ones(4)}
    with pytest.raises(ModelLoadError, match=r"weight\.nested_absmax: expected 3 scales and a nested_offset"):
        format_of().read(tensors, 8, 96)


def test_layouts_of_int8_that_are_refused() -> None:
    tensors = pack_int8(torch.randn(8, 96))[0] | {"weight_format": torch.tensor(1, dtype=torch.uint8)}
    with pytest.raises(ModelLoadError, match="weight_format: layout 1 is not supported"):
        format_of(INT8).read(tensors, 8, 96)


@pytest.mark.parametrize("config", [NF4, INT8])
def test_random_weights(config: dict[str, Any]) -> None:
    weight = format_of(config).random(256, 320, torch.Generator().manual_seed(0))
    assert weight.dequantize().std() == pytest.approx(0.02, rel=0.1)

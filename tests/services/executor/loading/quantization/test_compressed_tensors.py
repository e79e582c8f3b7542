"""Checkpoints of compressed-tensors against decoders written element by element from the format's definition.

The reader was also compared once with compressed-tensors 0.20 itself: what its `PackedQuantizationCompressor` and
`NaiveQuantizationCompressor` compress is read as the same weights that these decompress, and formats of modules are
those of its `match_targets`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.quantized import pack
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import WeightFormat
from pagewire.services.executor.loading.quantization.eight_bit import Fp8Format, Int8Format
from pagewire.services.executor.loading.quantization.integers import IntegerFormat
from pagewire.services.executor.loading.quantization.registry import quantization_of
from pagewire.services.executor.loading.weights_report import form
from tests.services.executor.loading.quantization.checkpoints import (
    assert_fits,
    assert_loads_as,
    field,
    put,
    random_scales,
    random_words,
    save_quantized,
)
from tests.sweep import examples

MODULE = "model.layers.0.mlp.up_proj"
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
DYNAMIC_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
DYNAMIC_FP8 = DYNAMIC_INT8 | {"type": "float"}
STATIC_INT8 = DYNAMIC_INT8 | {"strategy": "tensor", "dynamic": False}


def config_of(
    weights: dict[str, Any] | None, inputs: dict[str, Any] | None = None, stored: str = "pack-quantized", **changes: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": stored,
        "ignore": ["lm_head"],
        "config_groups": {"g": group},
    }
    return config | changes


def format_of(*args: Any, **changes: Any) -> WeightFormat:
    found = quantization_of(config_of(*args, **changes), None).format(MODULE)
    assert found is not None
    return found


@settings(max_examples=examples(30), deadline=None)
@given(
    bits=st.sampled_from([2, 4, 8]),
    num_outputs=st.integers(1, 20),
    num_inputs=st.integers(1, 80),
    group_size=st.sampled_from([None, -1, 8, 32]),
    symmetric=st.booleans(),
    act_order=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_packed(
    bits: int, num_outputs: int, num_inputs: int, group_size: int | None, symmetric: bool, act_order: bool, seed: int
) -> None:
    """Words of inputs for weights, of outputs for zero points; group_size None: one scale for the tensor."""
    size = num_inputs if group_size in (None, -1) else group_size
    assert size is not None
    groups, per_word, middle = -(-num_inputs // size), 32 // bits, 2 ** (bits - 1)
    strategy = {None: "tensor", -1: "channel"}.get(group_size, "group")
    weights = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    tensors = {
        "weight_packed": random_words((num_outputs, -(-num_inputs // per_word)), seed),
        "weight_scale": random_scales((1,) if group_size is None else (num_outputs, groups), seed, torch.bfloat16),
        "weight_shape": torch.tensor([num_outputs, num_inputs]),
    }
    g_idx = torch.arange(num_inputs) // size
    if act_order and strategy == "group":
        g_idx = g_idx[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(seed))]
        tensors["weight_g_idx"] = g_idx.int()
    if not symmetric and group_size is None:
        tensors["weight_zero_point"] = random_words((1,), seed, torch.int8) % middle
    elif not symmetric:
        tensors["weight_zero_point"] = random_words((-(-num_outputs // per_word), groups), seed)
    weight_format = format_of(weights)
    assert_fits(weight_format, tensors, num_outputs, num_inputs)
    weight = weight_format.read(tensors, num_outputs, num_inputs).dequantize()
    for n in range(num_outputs):
        for k in range(num_inputs):
            code = field(tensors["weight_packed"][n, k // per_word], k % per_word, bits) - middle
            group, zero = int(g_idx[k]), 0
            if not symmetric and group_size is None:
                zero = int(tensors["weight_zero_point"])
            elif not symmetric:
                zero = field(tensors["weight_zero_point"][n // per_word, group], n % per_word, bits) - middle
            scale = tensors["weight_scale"].float()
            assert weight[n, k] == (scale if group_size is None else scale[n, group]) * (code - zero)


@pytest.mark.parametrize("symmetric", [True, False])
def test_weight_only_integers_in_bytes(symmetric: bool) -> None:
    values, scales = random_words((10, 40), 0, torch.int8), random_scales((10, 3), 1)
    tensors = {"weight": values, "weight_scale": scales}
    zeros = torch.zeros(10, 3, dtype=torch.int8)
    if not symmetric:
        zeros = tensors["weight_zero_point"] = random_words((10, 3), 2, torch.int8)
    weight_format = format_of(
        INT8 | {"strategy": "group", "group_size": 16, "symmetric": symmetric}, None, "naive-quantized"
    )
    assert_fits(weight_format, tensors, 10, 40)
    groups = torch.arange(40) // 16
    expected = scales.float()[:, groups] * (values.float() - zeros.float()[:, groups])
    assert torch.equal(weight_format.read(tensors, 10, 40).dequantize(), expected)


@pytest.mark.parametrize("inputs", [DYNAMIC_INT8, STATIC_INT8])
@pytest.mark.parametrize("scale_shape", [(10, 1), (10,), (1,), ()])
def test_int8(inputs: dict[str, Any], scale_shape: tuple[int, ...]) -> None:
    values, scales = random_words((10, 40), 0, torch.int8), random_scales(scale_shape, 1, torch.bfloat16)
    tensors = {"weight": values, "weight_scale": scales}
    if inputs is STATIC_INT8:
        tensors["input_scale"] = torch.tensor([0.25]).bfloat16()
    weight_format = format_of(INT8, inputs, "int-quantized")
    assert_fits(weight_format, tensors, 10, 40)
    weight = weight_format.read(tensors, 10, 40)
    assert torch.equal(weight.dequantize(), values.float() * scales.float().reshape(-1, 1))
    assert getattr(weight, "input_scale", None) == (torch.tensor([0.25]) if inputs is STATIC_INT8 else None)


def test_formats_of_groups() -> None:
    """Names win over patterns, patterns over classes; what is ignored stays dense."""
    groups = {
        "a": {"targets": ["Linear"], "weights": INT8, "input_activations": DYNAMIC_INT8, "format": "int-quantized"},
        "b": {
            "targets": [r"re:.*down_proj$"],
            "weights": FP8,
            "input_activations": DYNAMIC_FP8,
            "format": "float-quantized",
        },
        "c": {"targets": ["model.layers.1.mlp.down_proj"], "weights": INT4, "format": "pack-quantized"},
        "d": {"targets": ["LlamaAttention"], "weights": None, "input_activations": DYNAMIC_FP8},
    }
    found = quantization_of(
        config_of(None, config_groups=groups, format="mixed-precision", ignore=["lm_head", r"re:.*layers\.2\.", "x"]),
        None,
    )
    assert found.format("model.layers.0.mlp.up_proj") == Int8Format(None)
    assert found.format("model.layers.0.mlp.down_proj") == Fp8Format(blocks=False)
    assert found.format("model.layers.1.mlp.down_proj") == IntegerFormat(4, 32, True, True, False)
    assert found.format("model.layers.2.mlp.down_proj") is None
    assert found.format("lm_head") is None
    assert found.format("model.embed_tokens") is None


def pack_int4(weight: Tensor, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    num_outputs, num_inputs = weight.shape
    groups = weight.view(num_outputs, -1, group_size)
    scales = (groups.abs().amax(2) / 7).bfloat16()
    codes = (groups / scales[..., None].float()).round().clamp(-8, 7)
    stored = (codes + 8).long().view(num_outputs, num_inputs)
    words = [[put(row[k : k + 8].tolist(), 4) for k in range(0, num_inputs, 8)] for row in stored]
    tensors = {
        "weight_packed": torch.tensor(words, dtype=torch.int32),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (codes * scales[..., None].float()).view_as(weight)


def test_packed_model(tmp_path: Path) -> None:
    expected = save_quantized(tmp_path, config_of(INT4), lambda _, weight: pack_int4(weight, 32))
    assert_loads_as(tmp_path, expected)


def test_fp8_model(tmp_path: Path) -> None:
    """Weights of each kind of scale, of which the blocks of one module are not whole."""

    def packer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if "layers.2" in name:
            blocks = torch.tensor([[0.25, 0.5], [2.0, 4.0]])[: -(-len(weight) // 128), : -(-weight.shape[1] // 128)]
            scales = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[: len(weight), : weight.shape[1]]
            values = (weight / scales).to(torch.float8_e4m3fn)
            return {"weight": values, "weight_scale": blocks}, values.float() * scales
        shape = (len(weight), 1) if "layers.1" in name else (1,)
        scale = torch.rand(shape, generator=torch.Generator().manual_seed(len(name))).add_(0.1)
        values = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scale}, values.float() * scale

    def group(layer: int, **weights: Any) -> dict[str, Any]:
        return {"targets": [rf"re:.*layers\.{layer}\..*"], "weights": FP8 | weights, "input_activations": DYNAMIC_FP8}

    groups = {
        "a": group(0, strategy="tensor"),
        "b": group(1),
        "c": group(2, strategy="block", block_structure=[128, 128]),
    }
    config = config_of(None, None, "float-quantized", config_groups=groups)
    assert_loads_as(tmp_path, save_quantized(tmp_path, config, packer))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of(INT4, format="nvfp4-pack-quantized"), r"group.*format: 'nvfp4-pack-quantized' is not supported"),
        (config_of(INT4, format="marlin-24"), r"format: 'marlin-24' is not supported"),
        (
            config_of(INT4, sparsity_config={"format": "sparse-24-bitmask"}),
            r"sparsity_config: .*'sparse-24-bitmask'.* is not",
        ),
        (config_of(INT4, transform_config={"config_groups": {"R1": {}}}), r"transform_config: rotations"),
        (config_of(INT4, config_groups={}), r"config_groups: expected an object with at least one group, found {}"),
        (config_of(INT4, config_groups={"W4A16": ["Linear"]}), r"config_groups\.W4A16: expected an object"),
        (config_of(INT4 | {"num_bits": 3}), r"config_groups\.g: .*num_bits: 3 is not supported, expected 2 or 4 or 8"),
        (config_of(INT4 | {"group_size": 0}), r"group_size: 0 is not supported"),
        (config_of(INT4, DYNAMIC_INT8), r"integers of strategy 'group' in format 'pack-quantized', symmetric True"),
        (config_of(INT8, DYNAMIC_FP8, "int-quantized"), r"quantization_config\.type: 'float' is not supported"),
        (config_of(INT8, DYNAMIC_INT8 | {"symmetric": False}, "int-quantized"), r"activations with a zero point"),
        (config_of(INT8, DYNAMIC_INT8 | {"dynamic": "local"}, "int-quantized"), r"dynamic: 'local' is not supported"),
        (config_of(FP8 | {"symmetric": False}, None, "float-quantized"), r"float numbers .* symmetric False"),
        (
            config_of(FP8 | {"strategy": "block", "block_structure": [1, 128]}, None, "float-quantized"),
            r"weights\.block_structure: \[1, 128\] is not supported, expected \[128, 128\]",
        ),
        (config_of(INT4, ignore=["re:("]), r"target 're:\(' is not a regular expression"),
    ],
)
def test_config_that_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        quantization_of(config, None)


def test_weights_without_groups_are_not_reported_as_groups() -> None:
    weight_format = format_of(INT8, DYNAMIC_INT8, "int-quantized")
    held = {form(pack(weight_format.random(16, size, torch.Generator()))) for size in (64, 160)}
    assert held == {"8-bit, a group per output"}


def test_values_that_are_refused() -> None:
    tensors, _ = pack_int4(torch.randn(16, 64), 32)
    for changes, message in (
        ({"weight_shape": torch.tensor([64, 16])}, r"weight_shape: expected \[16, 64\], found \[64, 16\]"),
        ({"weight_scale": torch.full((16, 2), torch.nan)}, r"weight_scale: has values that are not finite"),
        ({"weight_g_idx": torch.full((64,), 2)}, r"weight_g_idx: names groups 2 to 2, but scales has 2"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            format_of(INT4).read(tensors | changes, 16, 64)
    int8 = {"weight": torch.ones(16, 64, dtype=torch.int8), "weight_scale": torch.ones(16, 1)}
    int8["weight_scale"][3] = -1
    with pytest.raises(ModelLoadError, match=r"weight_scale: must not be negative, found -1\.0"):
        format_of(INT8, DYNAMIC_INT8, "int-quantized").read(int8, 16, 64)


@pytest.mark.parametrize(
    ("weights", "inputs", "stored"),
    [
        (INT4 | {"symmetric": False}, None, "pack-quantized"),
        (INT8, None, "naive-quantized"),
        (INT8, STATIC_INT8, "int-quantized"),
        (FP8, DYNAMIC_FP8, "float-quantized"),
        (FP8 | {"strategy": "block", "block_structure": [128, 128]}, None, "float-quantized"),
    ],
)
def test_random_weights(weights: dict[str, Any], inputs: dict[str, Any] | None, stored: str) -> None:
    weight = format_of(weights, inputs, stored).random(256, 320, torch.Generator().manual_seed(0)).dequantize()
    assert weight.shape == (256, 320)
    assert weight.std() == pytest.approx(0.02, rel=0.1)

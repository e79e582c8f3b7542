"""AWQ checkpoints against decoders written element by element from AutoAWQ's definitions.

The decoders and the reader were also compared once with what AutoAWQ 0.2.9 itself packs (`WQLinear_GEMM`,
`WQLinear_GEMV` and `WQLinear_GEMVFast.from_linear`) and unpacks (`dequantize_gemm`): the same weights.
"""

from __future__ import annotations

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
    field,
    put,
    random_scales,
    random_words,
    save_quantized,
)
from tests.services.executor.loading.test_loader import edit_config, edit_weights
from tests.services.executor.models.test_models import load
from tests.sweep import examples

CONFIG: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
NIBBLE_OF_COLUMN = [0, 4, 1, 5, 2, 6, 3, 7]
COLUMN_OF_NIBBLE = [0, 2, 4, 6, 1, 3, 5, 7]


def format_of(module: str = "model.layers.0.mlp.up_proj", **changes: Any) -> WeightFormat:
    found = quantization_of(CONFIG | changes, None).format(module)
    assert found is not None
    return found


def decode_gemm(qweight: Tensor, qzeros: Tensor | None, scales: Tensor, group_size: int) -> Tensor:
    words, zeros = qweight.tolist(), None if qzeros is None else qzeros.tolist()
    weight = []
    for n in range(scales.shape[1]):
        row = []
        for k in range(len(words)):
            group = k // group_size
            code = field(words[k][n // 8], NIBBLE_OF_COLUMN[n % 8], 4)
            zero = 8 if zeros is None else field(zeros[group][n // 8], NIBBLE_OF_COLUMN[n % 8], 4)
            row.append(code - zero)
        weight.append(row)
    groups = torch.arange(len(words)) // group_size
    return scales.float().t()[:, groups] * torch.tensor(weight)


@settings(max_examples=examples(25), deadline=None)
@given(
    num_outputs=st.integers(1, 5).map(lambda words: 8 * words),
    num_inputs=st.integers(1, 40),
    group_size=st.sampled_from([-1, 8, 16, 32, 64]),
    has_zeros=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gemm(num_outputs: int, num_inputs: int, group_size: int, has_zeros: bool, seed: int) -> None:
    size = num_inputs if group_size == -1 else group_size
    groups = -(-num_inputs // size)
    tensors = {
        "qweight": random_words((num_inputs, num_outputs // 8), seed),
        "scales": random_scales((groups, num_outputs), seed),
    }
    if has_zeros:
        tensors["qzeros"] = random_words((groups, num_outputs // 8), seed + 1)
    weight_format = format_of(group_size=group_size, zero_point=has_zeros)
    assert_fits(weight_format, tensors, num_outputs, num_inputs)
    weight = weight_format.read(tensors, num_outputs, num_inputs)
    expected = decode_gemm(tensors["qweight"], tensors.get("qzeros"), tensors["scales"], size)
    assert torch.equal(weight.dequantize(), expected)


def padded_words(num_inputs: int, group_size: int) -> int:
    """Words of zero points, as AutoAWQ's calculate_zeros_width has it."""
    step = {32: 4, 64: 2}.get(group_size, 1)
    words = (num_inputs // group_size + 7) // 8
    return (words + step - 1) // step * step


@pytest.mark.parametrize(("num_inputs", "group_size"), [(64, 32), (128, 64), (128, 128), (384, -1), (256, 32)])
def test_gemv(num_inputs: int, group_size: int) -> None:
    size = num_inputs if group_size == -1 else group_size
    width = padded_words(num_inputs, size)
    qweight, qzeros = random_words((16, num_inputs // 8), 1), random_words((16, width), 2)
    scales = random_scales((16, 8 * width), 3)
    tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    weight_format = format_of(version="GEMV", group_size=group_size)
    assert_fits(weight_format, tensors, 16, num_inputs)
    weight = weight_format.read(tensors, 16, num_inputs).dequantize()
    for n in range(16):
        for k in range(num_inputs):
            group = k // size
            code, zero = field(qweight[n, k // 8], k % 8, 4), field(qzeros[n, group // 8], group % 8, 4)
            assert weight[n, k] == scales[n, group].float() * (code - zero)


@pytest.mark.parametrize(("num_inputs", "group_size"), [(64, 32), (128, 64), (128, 128), (192, -1)])
def test_gemv_fast(num_inputs: int, group_size: int) -> None:
    """A word of int16 holds inputs of one row that lie 16 apart: four codes of every other word of AWQ's kernel."""
    size = num_inputs if group_size == -1 else group_size
    padded = 8 * padded_words(num_inputs, size)
    codes = torch.randint(16, (16, num_inputs), generator=torch.Generator().manual_seed(0))
    scales = random_scales((padded, 16), 1)
    zeros = torch.randint(16, (padded, 16), generator=torch.Generator().manual_seed(2))
    tensors = {"qweight": pack_gemv_fast(codes), "scales": scales, "qzeros": (-(scales.float() * zeros)).half()}
    weight_format = format_of(version="gemv_fast", group_size=group_size)
    assert_fits(weight_format, tensors, 16, num_inputs)
    weight = weight_format.read(tensors, 16, num_inputs).dequantize()
    groups = torch.arange(num_inputs) // size
    expected = scales.float()[groups].t() * codes + tensors["qzeros"].float()[groups].t()
    assert torch.equal(weight, expected)


def pack_gemv_fast(codes: Tensor) -> Tensor:
    """Packs codes for GEMV: of 64 inputs of four rows, nibbles are numbered row first; within 32 inputs, k is number
    `place(k)`."""
    num_outputs, num_inputs = codes.shape

    def place(k: int) -> int:
        a, b, c = k // 8, k % 8 // 2, k % 2
        return 8 * b + 4 * c + a

    words = torch.zeros(num_outputs // 4, num_inputs, dtype=torch.int16)
    for rows in range(num_outputs // 4):
        for block in range(num_inputs // 64):
            nibbles = [0] * 256
            for row in range(4):
                for k in range(64):
                    code = int(codes[4 * rows + row, 64 * block + k])
                    nibbles[64 * row + 32 * (k // 32) + place(k % 32)] = code
            for word in range(64):
                words[rows, 64 * block + word] = put(nibbles[4 * word : 4 * word + 4], 4, torch.int16)
    return words


def pack_gemm(weight: Tensor, group_size: int) -> tuple[dict[str, Tensor], Tensor]:
    """The nearest of 16 steps between a group's extremes, as tensors and as the weight that they stand for."""
    num_outputs, num_inputs = weight.shape
    groups = -(-num_inputs // group_size)
    scales, zeros = torch.zeros(groups, num_outputs).half(), torch.zeros(groups, num_outputs, dtype=torch.int64)
    codes = torch.zeros(num_inputs, num_outputs, dtype=torch.int64)
    for group in range(groups):
        inputs = slice(group * group_size, min((group + 1) * group_size, num_inputs))
        low, high = weight[:, inputs].amin(1).clamp(max=0), weight[:, inputs].amax(1).clamp(min=0)
        scales[group] = ((high - low) / 15).half()
        zeros[group] = (-low / scales[group]).round().clamp(0, 15).long()
        steps = (weight[:, inputs].t() / scales[group]).round().long()
        codes[inputs] = (steps + zeros[group]).clamp(0, 15)
    tensors = {"qweight": pack_columns(codes), "qzeros": pack_columns(zeros), "scales": scales}
    return tensors, decode_gemm(tensors["qweight"], tensors["qzeros"], scales, group_size)


def pack_columns(values: Tensor) -> Tensor:
    words = [
        [put([row[start + column] for column in COLUMN_OF_NIBBLE], 4) for start in range(0, len(row), 8)]
        for row in values.tolist()
    ]
    return torch.tensor(words, dtype=torch.int32)


def test_model(tmp_path: Path) -> None:
    """One layer dense by modules_to_not_convert; groups of 64 of 96 and 160 inputs: the last is smaller."""

    def packer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return None if "layers.1.mlp" in name else pack_gemm(weight, 64)

    config = CONFIG | {"group_size": 64, "modules_to_not_convert": ["layers.1.mlp"]}
    assert_loads_as(tmp_path, save_quantized(tmp_path, config, packer))


def test_config_beside_config_json(tmp_path: Path) -> None:
    """AutoAWQ once wrote `quant_config.json`, with keys of its own."""
    expected = save_quantized(tmp_path, CONFIG, lambda _, weight: pack_gemm(weight, 64), num_hidden_layers=1)
    edit_config(tmp_path, quantization_config=...)
    file = tmp_path / "quant_config.json"
    file.write_text('{"zero_point": true, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}')
    assert_loads_as(tmp_path, expected)


def test_modules_that_stay_dense() -> None:
    found = quantization_of(CONFIG | {"modules_to_not_convert": ["layers.0.mlp"]}, None)
    assert [
        name for name in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.up_proj") if found.format(name)
    ] == []
    assert found.format("model.layers.10.mlp.up_proj") is not None
    names = {"model.layers.0.self_attn.q_proj.weight", "lm_head.qweight"}
    found = quantization_of(CONFIG, names)
    assert found.format("model.layers.0.self_attn.q_proj") is None
    assert found.format("lm_head") is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 8}, r"bits: 8 is not supported, expected 4"),
        ({"bits": True}, r"bits: True is not supported"),
        ({"version": "marlin"}, r"version: 'marlin' is not supported, expected one of gemm, gemv, gemv_fast"),
        ({"group_size": 0}, r"group_size: 0 is not supported, expected -1 or a multiple of 8"),
        ({"group_size": "128"}, r"group_size: '128' is not supported"),
        ({"zero_point": "yes"}, r"zero_point: 'yes' is not supported, expected True or False"),
        ({"modules_to_not_convert": "lm_head"}, r"modules_to_not_convert: expected a list of names, found 'lm_head'"),
    ],
)
def test_config_that_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        quantization_of(CONFIG | changes, None)


@pytest.mark.parametrize(
    ("changes", "shape", "message"),
    [
        ({}, (20, 64), "the number of outputs is 20, but this format stores 8 of them in a word"),
        ({"version": "gemv"}, (16, 12), "the number of inputs is 12"),
        ({"version": "gemv", "group_size": 16}, (16, 64), "group size 16 does not fit 64 inputs"),
        ({"version": "gemv_fast", "group_size": 128}, (16, 192), "group size 128 does not fit 192 inputs"),
        ({"version": "gemv_fast", "group_size": 32}, (16, 96), "the number of inputs is 96"),
    ],
)
def test_shapes_that_are_refused(changes: dict[str, Any], shape: tuple[int, int], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        format_of(**changes).tensors(*shape)


def test_tensors_that_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, CONFIG | {"group_size": 32}, lambda _, weight: pack_gemm(weight, 32), num_hidden_layers=1)
    original = (tmp_path / "model.safetensors").read_bytes()
    infinite = random_scales((5, 96), 0)
    infinite[3, 7] = torch.inf
    cases: list[tuple[str, Tensor, str]] = [
        (
            "scales",
            random_scales((4, 96), 0),
            r"down_proj\.scales: expected shape \[5, 96\], found \[4, 96\]; group_size 32 in",
        ),
        ("qzeros", random_words((5, 12), 0, torch.int16), r"down_proj\.qzeros: expected int32, found int16"),
        ("scales", infinite, r"tensor model\.layers\.0\.mlp\.down_proj\.scales: has values that are not finite"),
    ]
    for suffix, tensor, message in cases:
        (tmp_path / "model.safetensors").write_bytes(original)
        edit_weights(tmp_path, **{f"model__layers__0__mlp__down_proj__{suffix}": tensor})
        with pytest.raises(ModelLoadError, match=message):
            load(tmp_path)


def test_random_weights() -> None:
    weight = format_of().random(256, 320, torch.Generator().manual_seed(0))
    assert weight.shape == (256, 320)
    assert weight.dequantize().std() == pytest.approx(0.02, rel=0.1)

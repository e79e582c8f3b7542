"""Products with int8 and fp8 weights packed as groups, and with tables of numbers, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels.cpu.layouts import grouped_layout
from pagewire.kernels.quantized import Fp8Weight, GroupedWeight, Int8Weight, PackedGrouped, pack
from tests.kernels.cpu.grouped_products import (
    DTYPES,
    FRACTIONAL_CODEBOOK,
    assert_product_is_close,
    is_fixed_point,
    operands_rounded,
    random_fp8,
)
from tests.sweep import examples

pytestmark = pytest.mark.pairs


def test_int8_weights_are_packed_as_groups() -> None:
    weight = Int8Weight(torch.randint(-128, 128, (48, 100), dtype=torch.int8), torch.rand(48))
    packed = pack(weight)
    assert isinstance(packed, PackedGrouped)
    assert torch.equal(grouped_layout.unpack(packed).dequantize(), weight.dequantize())


@settings(max_examples=examples(30), deadline=None)
@given(
    num_tokens=st.sampled_from([0, 1, 3, 8, 13, 40]),
    num_inputs=st.sampled_from([17, 32, 160, 192, 288, 576]),
    num_outputs=st.integers(1, 300),
    blocks=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
)
def test_fp8_weights_are_packed_as_groups(
    num_tokens: int, num_inputs: int, num_outputs: int, blocks: bool, dtype: torch.dtype, with_bias: bool
) -> None:
    weight = random_fp8(num_outputs, num_inputs, blocks=blocks)
    packed = pack(weight)
    assert isinstance(packed, PackedGrouped)
    assert torch.equal(grouped_layout.unpack(packed).dequantize(), weight.dequantize())
    x = torch.randn(num_tokens, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if with_bias else None
    actual, grouped = packed(x, bias), weight.as_grouped()
    assert actual.dtype is dtype
    rounded = operands_rounded(grouped, dtype, num_tokens)
    fixed_point = is_fixed_point(grouped, dtype, num_tokens)
    assert_product_is_close(actual, x, grouped, bias, operands_rounded=rounded, fixed_point=fixed_point)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["nf4", "groups of 96", "fp8", "fp8 blocks", "fp8, nothing subnormal"])
@pytest.mark.parametrize("num_inputs", [288, 1100])
def test_tables_of_numbers_in_every_form(bf16_form: int, dtype: torch.dtype, kind: str, num_inputs: int) -> None:
    """Several tiles of outputs are multiplied together, and the last one is not full; inputs of more
    than one stage, and stages do not end with groups."""
    torch.manual_seed(0)
    num_outputs, before = 1041, torch.get_num_threads()
    if kind in ("nf4", "groups of 96"):
        group_size = 64 if kind == "nf4" else 96
        codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
        scales = torch.rand(num_outputs, -(-num_inputs // group_size))
        weight = GroupedWeight(codes, 4, group_size, scales, codebook=FRACTIONAL_CODEBOOK)
    else:
        subnormal = kind != "fp8, nothing subnormal"
        weight = random_fp8(num_outputs, num_inputs, blocks=kind == "fp8 blocks", subnormal=subnormal).as_grouped()
    packed, x = pack(weight), torch.randn(40, num_inputs).to(dtype)
    torch.set_num_threads(1)
    try:
        for num_tokens in (1, 4, 7, 12, 16, 17, 40):
            tokens = x[:num_tokens]
            rounded = operands_rounded(weight, dtype, num_tokens, bf16_form)
            fixed_point = is_fixed_point(weight, dtype, num_tokens)
            assert_product_is_close(
                packed(tokens, None), tokens, weight, None, operands_rounded=rounded, fixed_point=fixed_point
            )
    finally:
        torch.set_num_threads(before)


def test_a_table_of_other_bytes_is_refused() -> None:
    weight = GroupedWeight(torch.zeros(16, 64, dtype=torch.uint8), 8, 64, torch.ones(16, 1), codebook=torch.zeros(256))
    with pytest.raises(ValueError, match="no codebook of 8 bits other than E4M3"):
        pack(weight)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("num_tokens", [1, 20])
@pytest.mark.parametrize("other_codes", [0x00, 0x38], ids=["zeros", "ones"])
@pytest.mark.parametrize("scales", [torch.ones(40), torch.ones(1, 1)], ids=["outputs", "blocks"])
def test_nan_in_fp8_weights_shows_in_the_result(code: int, num_tokens: int, other_codes: int, scales: Tensor) -> None:
    codes = torch.full((40, 64), other_codes, dtype=torch.uint8)
    codes[3, 5] = code
    packed = pack(Fp8Weight(codes.view(torch.float8_e4m3fn), scales))
    result = packed(torch.ones(num_tokens, 64).bfloat16(), None)
    assert result.isnan().nonzero()[:, 1].unique().tolist() == [3]

"""Grouped weights as the Triton kernels read them, and the machine instructions that make numbers of their codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from pagewire.kernels.quantized.weights import BITS, GroupedWeight
from pagewire.kernels.triton.products import grouped_layout, grouped_tile, grouped_wide
from tests.kernels.compiled.ptx import halves, register_of, run
from tests.kernels.grouped_weights import FORMS, grouped_weight
from tests.sweep import examples

IQ4_NL = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]).float()


@settings(max_examples=examples(60), deadline=None)
@given(
    num_outputs=st.integers(1, 150),
    num_inputs=st.integers(1, 300),
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from((16, 32, 48, 64, 128, 1000)),
    form=st.sampled_from(FORMS),
    permuted=st.booleans(),
)
def test_unpacked_weights_are_the_packed_ones(
    num_outputs: int, num_inputs: int, bits: int, group_size: int, form: str, permuted: bool
) -> None:
    weight = grouped_weight(num_outputs, num_inputs, bits, group_size, form, permuted=permuted)
    packed = grouped_layout.pack(weight)
    unpacked = grouped_layout.unpack(packed)
    assert unpacked.shape == weight.shape == packed.shape
    assert torch.equal(unpacked.dequantize(), weight.dequantize())
    assert packed.scales.dtype == (torch.float16 if form in ("symmetric", "zeros", "minimums") else torch.float32)


def test_codes_lie_where_the_layout_says() -> None:
    weight = grouped_weight(70, 300, 4, 128, "symmetric")
    codes = grouped_layout.pack(weight).codes
    assert codes.shape == (2, 3, 64, 32)
    assert codes.is_contiguous()
    for output, column in ((0, 0), (69, 299), (63, 127), (64, 128), (5, 40)):
        tile, inside = divmod(column, 128)
        plane, element = divmod(inside, 32)
        word = int(codes[output // 64, tile, output % 64, element])
        assert word >> 4 * plane & 15 == weight.codes[output, column]


def test_a_codebook_of_integers_becomes_codes() -> None:
    weight = replace(grouped_weight(9, 64, 4, 32, "symmetric"), zero_point=0, codebook=IQ4_NL)
    packed = grouped_layout.pack(weight)
    assert (packed.bits, packed.zero_point, packed.codebook) == (8, 128, None)
    assert torch.equal(grouped_layout.unpack(packed).dequantize(), weight.dequantize())


@pytest.mark.parametrize("bits", [2, 4])
def test_a_codebook_of_fractions_is_kept(bits: int) -> None:
    codebook = torch.linspace(-1, 1, 2**bits)
    weight = replace(grouped_weight(9, 64, bits, 32, "symmetric"), zero_point=0, codebook=codebook)
    packed = grouped_layout.pack(weight)
    assert packed.bits == 4
    assert packed.codebook is not None
    assert torch.equal(grouped_layout.unpack(packed).dequantize(), weight.dequantize())


def test_bytes_of_a_weight() -> None:
    """Groups of 128 take 4.125 bits with float16 scales, 4.25 with zero points besides."""
    for form, bits in (("symmetric", 4.125), ("zeros", 4.25)):
        packed = grouped_layout.pack(grouped_weight(128, 1024, 4, 128, form))
        assert packed.nbytes * 8 == bits * 128 * 1024


# --- machine instructions ---


def elements() -> tuple[Tensor, Tensor]:
    """Every element of 16 bits, and another one beside it."""
    first = torch.arange(2**16)
    return first, first.flip(0).roll(77)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_planes_are_exact(bits: int, dtype: torch.dtype) -> None:
    first, second = elements()
    half = dtype is torch.float16
    for plane in range(16 // bits):
        text = grouped_tile._plane_asm(bits, plane, half)
        for zero in (0, 2 ** (bits - 1), 2**bits - 1):
            added = torch.tensor(float(grouped_tile._power_of_two(bits, plane, half) - zero))
            if bits == 8 and not half:
                operand = added.view(torch.int32).long() & 0xFFFFFFFF
                operands = {"$2": operand, "$3": operand}
            else:
                operands = {"$2": register_of(added.to(dtype), added.to(dtype))}
                assert added.to(dtype) == added
            registers = run(text, {"$1": first | second << 16, **operands}, dtype)
            for element, actual in zip((first, second), halves(registers["$0"], dtype), strict=True):
                expected = (element >> bits * plane & (2**bits - 1)) - zero
                assert torch.equal(actual, expected.float())


def test_a_weight_without_groups_to_spare() -> None:
    weight = GroupedWeight(torch.ones(1, 1, dtype=torch.uint8), 4, 1, torch.ones(1, 1).half(), zero_point=8)
    packed = grouped_layout.pack(weight)
    assert packed.scales.shape == (1, 64)
    assert torch.equal(grouped_layout.unpack(packed).dequantize(), torch.tensor([[-7.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("two", [False, True])
def test_a_scaled_weight_is_rounded_once_but_for_a_minimum(dtype: torch.dtype, minimums: bool, two: bool) -> None:
    numbers = torch.arange(-15, 16).to(dtype)
    scale, minimum = torch.rand(2, 500, 1) * 0.02 + 0.002
    minimum = -8 * minimum
    registers = {"$1": register_of(numbers, numbers.flip(0))}
    values = [scale, minimum][: 1 + minimums]
    parts = [part for value in values for part in (value.to(dtype), (value - value.to(dtype).float()).to(dtype))]
    if not two:
        parts = parts[::2]
        scale, minimum = scale.to(dtype).float(), minimum.to(dtype).float()
    registers |= {f"${2 + index}": register_of(part, part) for index, part in enumerate(parts)}
    text = grouped_wide._scaling_asm.fn(dtype is torch.float16, minimums, two)
    weights = run(text, registers, dtype)["$0"]
    unit = torch.finfo(dtype).eps / 2
    for number, actual in zip((numbers, numbers.flip(0)), halves(weights, dtype), strict=True):
        scaled, added = number.double() * scale.double(), minimum.double() * minimums
        # What is left of a sum of two after that, and what fp16 has no exponent for.
        least = torch.finfo(dtype).smallest_normal * unit  # half a step of the smallest numbers
        slack = 4 * unit**2 * (scaled.abs() + added.abs()) + least * (number.double().abs() + 4)
        roundings = 1 + (minimums and two)
        assert ((actual - (scaled + added)).abs() <= roundings * unit * (scaled + added).abs() * 1.01 + slack).all()

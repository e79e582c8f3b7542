"""Grouped weights for tests of products with them, and how exact these products are."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.cpu.products.packed_linear import in_fixed_point
from pagewire.kernels.quantized import BITS, E4M3, Fp8Weight, GroupedWeight, PackedGrouped
from tests.kernels.processor import CPU, fixed_point_error

# Relative to the sum of |x * w|: rounding of sums in fp32, of a result, of x and w on their way to bf16.
FP32_ROUNDING = 1e-6
RESULT_ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
BF16_OPERANDS = 2**-8

MAX_INPUT_BLOCK = 64  # inputs that share a scale when they are quantized
LARGEST_CODE = 127 * 128  # of a quantized input
AMX_MIN_TOKENS = 16  # from here on operands are rounded to bf16 where the machine has a matrix unit
AMX_MIN_TABLE_TOKENS = 12  # likewise, of weights with a table of numbers
# From here on bf16 products are in fixed point, where that is the fastest: of tables, codes of 8 bits, other codes.
FIXED_POINT_TOKENS = (16, 16, 16) if "avx512f" in CPU else (16, 32, 20)
INTEGER_CODEBOOK = torch.tensor([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
FRACTIONAL_CODEBOOK = torch.linspace(-1, 1, 16) ** 3

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@st.composite
def weights(draw: st.DrawFn) -> GroupedWeight:
    num_outputs = draw(st.integers(1, 70))
    bits = draw(st.sampled_from(BITS))
    two_levels = draw(st.booleans())
    group_size = draw(st.sampled_from([16, 32] if two_levels else [16, 24, 32, 64, 128, 10_000]))
    num_inputs = draw(st.one_of(st.integers(1, 80), st.sampled_from([256, 300, 576])))
    group_size = min(group_size, num_inputs)
    if two_levels and 256 % group_size:
        two_levels = False
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    groups, supers = -(-num_inputs // group_size), -(-num_inputs // 256)

    def random(columns: int, low: int, high: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (num_outputs, columns), generator=generator).to(dtype)

    dtype = draw(st.sampled_from([torch.float16, torch.float32]))
    scales = torch.randn(num_outputs, groups, generator=generator).to(dtype) / 100
    super_scales = None
    if two_levels:
        scales, super_scales = random(groups, -128, 128, torch.int8), torch.rand(num_outputs, supers).half() / 1000
    offsets, super_offsets, zero_point, codebook = None, None, 0, None
    kind = draw(st.sampled_from(["zero point", "zeros", "minimums", "codebook"]))
    if kind == "codebook" and bits <= 4:
        codebook = draw(st.sampled_from([INTEGER_CODEBOOK, FRACTIONAL_CODEBOOK]))[: 2**bits].clone()
    elif kind == "codebook" and bits < 8:
        codebook = torch.linspace(-1, 1, 2**bits) ** 3
    elif kind == "codebook" and bits == 8:
        codebook = E4M3
    elif kind == "zeros":
        offsets = random(groups, 0, 2**bits, torch.uint8)
    elif kind == "minimums" and two_levels:
        offsets = random(groups, 0, 256, torch.uint8)
        super_offsets = -torch.rand(num_outputs, supers).half() / 1000
    elif kind == "minimums":
        offsets = torch.randn(num_outputs, groups, generator=generator).to(dtype)
    else:
        zero_point = draw(st.integers(0, 2**bits - 1))
    permutation = torch.randperm(num_inputs, generator=generator).int() if draw(st.booleans()) else None
    codes = random(num_inputs, 0, 2**bits, torch.uint8)
    if codebook is E4M3:
        codes[codes % 128 == 127] = 0  # not NaN
    return GroupedWeight(
        codes, bits, group_size, scales, super_scales, offsets, super_offsets, zero_point, codebook, permutation
    )


def has_table(weight: GroupedWeight) -> bool:
    """Returns whether codes stand for numbers that are not bytes."""
    codebook = weight.codebook
    return codebook is not None and (weight.bits != 4 or not codebook.equal(codebook.round()))


def is_fixed_point(weight: GroupedWeight, dtype: torch.dtype, num_tokens: int) -> bool:
    """Returns whether the product is in fixed point, in the form that is set."""
    table, byte, other = FIXED_POINT_TOKENS
    least = table if has_table(weight) else byte if weight.bits == 8 else other
    if weight.codebook is not None and weight.bits not in (4, 8):
        return False
    return dtype is torch.bfloat16 and in_fixed_point(num_tokens, least)


def operands_rounded(weight: GroupedWeight, dtype: torch.dtype, num_tokens: int, form: int = 0) -> bool:
    """Returns whether inputs and weights, or 4 bits' numbers of a table, become bf16 here. form: see `bf16_form`."""
    if dtype is torch.float32 or is_fixed_point(weight, dtype, num_tokens):
        return False
    least = AMX_MIN_TABLE_TOKENS if has_table(weight) else AMX_MIN_TOKENS
    if form == 0 and "amx_bf16" in CPU and num_tokens >= least:
        return True
    as_pairs = "avx512_bf16" in CPU and (form == 1 or (form == 0 and "GenuineIntel" not in CPU))
    return has_table(weight) and weight.bits == 4 and dtype is torch.bfloat16 and (as_pairs or "avx512f" not in CPU)


def op_arguments(packed: PackedGrouped) -> tuple[Tensor | None, ...]:
    return (packed.codes, packed.scales, packed.offsets, packed.codebook)


def form(packed: PackedGrouped) -> tuple[int, int, int]:
    return packed.bits, packed.group_size, packed.zero_point


def assert_product_is_close(
    actual: Tensor,
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    *,
    operands_rounded: bool,
    fixed_point: bool = False,
) -> None:
    """Within what quantizing x to 15 bits and rounding can change, or rounding both to fixed point."""
    matrix, x64 = weight.dequantize().double(), x.double()
    expected = x64 @ matrix.T + (0 if bias is None else bias.double())
    magnitude = x64.abs() @ matrix.abs().T + expected.abs() + (0 if bias is None else bias.double().abs())
    tolerance = FP32_ROUNDING * magnitude + 2**-22 * _uncancelled(x64, weight) + 1e-7
    if x.dtype is not torch.float32:
        ordered = x64 if weight.permutation is None else x64[:, weight.permutation.long()]
        columns = matrix if weight.permutation is None else matrix[:, weight.permutation.long()]
        if operands_rounded:
            tolerance += BF16_OPERANDS * magnitude
        if fixed_point:
            tolerance += _fixed_point_error(ordered, columns, weight)
        for first in range(0, weight.group_size * weight.scales.shape[1], weight.group_size):
            group, group_columns = (m[:, first : first + weight.group_size] for m in (ordered, columns))
            for inputs, block in zip(
                group.split(MAX_INPUT_BLOCK, 1), group_columns.split(MAX_INPUT_BLOCK, 1), strict=True
            ):
                half_step = inputs.abs().amax(1, keepdim=True) / LARGEST_CODE / 2
                tolerance += half_step * block.abs().sum(1)
    tolerance += RESULT_ROUNDING[x.dtype] * expected.abs()
    assert ((actual.double() - expected).abs() <= tolerance).all()


def _fixed_point_error(x: Tensor, matrix: Tensor, weight: GroupedWeight) -> Tensor:
    """Of inputs and columns in the order of the codes. Scales of fp8 are chosen for the numbers that there are, others
    for all numbers that there could be; of these a minimum, a factor and the product of factor and code are rounded."""

    size = min(weight.group_size, weight.shape[1])
    width = 16 if size <= 16 else -(-size // 32) * 32

    def padded(numbers: Tensor) -> Tensor:
        return torch.cat([F.pad(group, (0, width - group.shape[1])) for group in numbers.split(size, 1)], 1)

    is_fp8 = weight.codebook is not None and weight.bits == 8
    largest = matrix.abs()
    if not is_fp8:
        extremes = (0, 2**weight.bits - 1)
        if weight.codebook is not None:
            extremes = int(weight.codebook.argmin()), int(weight.codebook.argmax())
        for code in extremes:
            numbers = replace(weight, codes=torch.full_like(weight.codes, code), permutation=None).dequantize()
            largest = largest.maximum(numbers.double().abs())
    units = -(-(width if is_fp8 else padded(x).shape[1]) // 32)  # of which each block has at most 24
    blocks = -(-units // 24)
    while is_fp8 and units % blocks:
        blocks += 1
    block = -(-units // blocks) * 32
    return fixed_point_error(padded(x), padded(matrix), padded(largest), block, steps=0.5 if is_fp8 else 1.5)


def _uncancelled(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Returns sums of |x * scale * code|: their rounding shows although zero points and minimums cancel them."""
    spread = weight.flat_scales().double().abs().repeat_interleave(weight.group_size, 1)[:, : weight.shape[1]]
    ordered = x if weight.permutation is None else x[:, weight.permutation.long()]
    return 255 * (ordered.abs() @ spread.T)


def random_fp8(num_outputs: int, num_inputs: int, *, blocks: bool, subnormal: bool = True) -> Fp8Weight:
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    numbers = torch.randn(num_outputs, num_inputs, generator=generator)
    if subnormal:
        numbers[:, ::3] *= 2**-8  # below the smallest normal number
    else:
        numbers = numbers.abs().clamp(min=2**-6).copysign(numbers)
    scale_shape = (-(-num_outputs // 128), -(-num_inputs // 128)) if blocks else (num_outputs,)
    return Fp8Weight(numbers.to(torch.float8_e4m3fn), torch.rand(scale_shape, generator=generator) + 0.1)

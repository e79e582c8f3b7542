"""Quantized weights on a CPU: the packed layout, products and rows, in C++ and in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import reference
from pagewire.kernels.cpu.layouts import grouped_layout
from pagewire.kernels.cpu.products.packed_linear import in_fixed_point
from pagewire.kernels.quantized import BITS, E4M3, Fp8Weight, GroupedWeight, Int8Weight, PackedGrouped, pack
from pagewire.kernels.quantized.packed import pack_grouped, unpack_grouped
from tests.kernels.grouped_weights import FORMS, grouped_weight
from tests.kernels.implementations import fallback, native
from tests.kernels.pairs import pairs
from tests.kernels.processor import BF16_FORMS, CPU, bf16_multiplied_as, fixed_point_error
from tests.sweep import examples

pytestmark = pytest.mark.pairs

# Relative to the sum of |x * w|: rounding of sums in fp32, of a result, of x and w on their way to bf16.
FP32_ROUNDING = 1e-6
RESULT_ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
BF16_OPERANDS = 2**-8

MAX_INPUT_BLOCK = 64  # inputs that share a scale when they are quantized
LARGEST_CODE = 127 * 128  # of a quantized input
AMX_MIN_TOKENS = 16  # from here on operands are rounded to bf16 where the machine has a matrix unit
AMX_MIN_TABLE_TOKENS = 12  # likewise, of weights with a table of numbers
# From here on bf16 products are in fixed point, where that is the fastest: of tables, codes of 8 bits, other codes.
FIXED_POINT_TOKENS = (16, 96, 40) if "avx512f" in CPU else (16, 32, 20)
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

    def padded(numbers: Tensor) -> Tensor:
        size = min(weight.group_size, weight.shape[1])
        width = 16 if size <= 16 else -(-size // 32) * 32
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
    return fixed_point_error(padded(x), padded(matrix), padded(largest), steps=0.5 if is_fp8 else 1.5)


def _uncancelled(x: Tensor, weight: GroupedWeight) -> Tensor:
    """Sums of |x * scale * code|, whose rounding shows although zero points and minimums cancel them."""
    spread = weight.flat_scales().double().abs().repeat_interleave(weight.group_size, 1)[:, : weight.shape[1]]
    ordered = x if weight.permutation is None else x[:, weight.permutation.long()]
    return 255 * (ordered.abs() @ spread.T)


@settings(max_examples=50, deadline=None)
@given(weight=weights())
def test_packing_loses_nothing(weight: GroupedWeight) -> None:
    packed = pack_grouped(weight, "cpu")
    unpacked = unpack_grouped(packed)
    assert torch.equal(unpacked.dequantize(), weight.dequantize())
    assert torch.equal(unpacked.codes, weight.codes)
    assert packed.shape == weight.shape
    for tensor in op_arguments(packed):
        assert tensor is None or tensor.is_contiguous()


@settings(max_examples=70, deadline=None)
@given(
    weight=weights(),
    num_tokens=st.sampled_from([0, 1, 2, 3, 5, 8, 9, 17, 40]),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
)
def test_grouped_linear(weight: GroupedWeight, num_tokens: int, dtype: torch.dtype, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    num_outputs, num_inputs = weight.shape
    x = torch.randn(num_tokens, num_inputs, generator=generator).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if with_bias else None
    packed = pack_grouped(weight, "cpu")
    codes, scales, offsets, codebook = op_arguments(packed)
    for cpu in (native, fallback):
        actual = cpu.grouped_linear(
            x, codes, scales, offsets, codebook, packed.permutation, bias, num_outputs, *form(packed)
        )
        assert actual.dtype is dtype
        assert actual.shape == (num_tokens, num_outputs)
        rounded = cpu is fallback or operands_rounded(weight, dtype, num_tokens)
        fixed_point = cpu is native and is_fixed_point(weight, dtype, num_tokens)
        assert_product_is_close(actual, x, weight, bias, operands_rounded=rounded, fixed_point=fixed_point)


@settings(max_examples=40, deadline=None)
@given(weight=weights(), num_tokens=st.sampled_from([0, 1, 3, 8, 9]), dtype=st.sampled_from(DTYPES))
def test_rough_grouped_linear(weight: GroupedWeight, num_tokens: int, dtype: torch.dtype) -> None:
    """No further off than an input of each group that is wrong by half a step of 8 bits is."""
    if weight.codebook is not None:
        return
    x = torch.randn(num_tokens, weight.shape[1], generator=torch.Generator().manual_seed(num_tokens)).to(dtype)
    packed = pack_grouped(weight, "cpu")
    codes, scales, offsets, _ = op_arguments(packed)
    for cpu in (native, fallback):
        actual = cpu.rough_grouped_linear(
            x, codes, scales, offsets, packed.permutation, None, weight.shape[0], *form(packed)
        )
        assert actual.dtype is dtype
        matrix = weight.dequantize().double()
        step = x.double().abs().amax(dim=1, keepdim=True) / 127
        bound = step * matrix.abs().sum(dim=1) + 0.01 * (x.double().abs() @ matrix.abs().T) + 1e-6
        assert ((actual.double() - x.double() @ matrix.T).abs() <= bound).all()


def assert_fixed_point_is_close(weight: GroupedWeight, x: Tensor) -> None:
    """Compares products in fixed point with the reference; x: bf16."""
    packed = pack_grouped(weight, "cpu")
    with bf16_multiplied_as(3):
        actual, fixed_point = packed(x, None), is_fixed_point(weight, x.dtype, len(x))
        rounded = operands_rounded(weight, x.dtype, len(x), 3)
    assert_product_is_close(actual, x, weight, None, operands_rounded=rounded, fixed_point=fixed_point)


@settings(max_examples=examples(100), deadline=None)
@given(weight=weights(), num_tokens=st.sampled_from([1, 2, 11, 12, 13, 25, 40]), scale=st.sampled_from([1e-6, 1, 1e4]))
def test_fixed_point(weight: GroupedWeight, num_tokens: int, scale: float) -> None:
    """Inputs of which one in each token is far larger or smaller than the others are among them."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, weight.shape[1], generator=generator)
    x[:, num_tokens % weight.shape[1]] *= scale
    assert_fixed_point_is_close(weight, x.bfloat16())


@pytest.mark.parametrize("kind", ["minimums", "zeros", "nf4", "fp8", "fp8 groups of 96"])
def test_fixed_point_of_more_inputs_than_a_stage_holds(kind: str) -> None:
    torch.manual_seed(0)
    num_outputs, num_inputs = 70, 2400
    if kind == "nf4":
        codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8)
        weight = GroupedWeight(codes, 4, 64, torch.rand(num_outputs, 38), codebook=FRACTIONAL_CODEBOOK)
    elif kind == "fp8 groups of 96":
        codes = torch.randint(0, 127, (num_outputs, num_inputs), dtype=torch.uint8)
        weight = GroupedWeight(codes, 8, 96, torch.rand(num_outputs, 25), codebook=E4M3)
    elif kind == "fp8":
        weight = random_fp8(num_outputs, num_inputs, blocks=True).as_grouped()
    else:
        weight = grouped_weight(num_outputs, num_inputs, 4, 32, kind)
    assert_fixed_point_is_close(weight, torch.randn(40, num_inputs).bfloat16())


@pytest.mark.parametrize("kind", ["2 bits", "4 bits", "6 bits", "8 bits", "nf4", "fp8"])
def test_fixed_point_is_as_precise_as_bf16(kind: str) -> None:
    """Fixed point changes results by far less than their rounding does."""
    torch.manual_seed(0)
    if kind == "fp8":
        weight = random_fp8(100, 576, blocks=False).as_grouped()
    elif kind == "nf4":
        codes = torch.randint(0, 16, (100, 576), dtype=torch.uint8)
        weight = GroupedWeight(codes, 4, 64, torch.rand(100, 9) + 0.5, codebook=FRACTIONAL_CODEBOOK)
    else:
        bits = int(kind[0])
        codes = torch.randint(0, 2**bits, (100, 576), dtype=torch.uint8)
        weight = GroupedWeight(codes, bits, 32, torch.rand(100, 18) + 0.5, zero_point=2 ** (bits - 1))
    x = torch.randn(40, 576).bfloat16()
    exact = x.double() @ weight.dequantize().double().T
    packed = pack_grouped(weight, "cpu")
    errors = {}
    for form in (2, 3):
        with bf16_multiplied_as(form):
            is_fixed = is_fixed_point(weight, x.dtype, len(x))
            errors[form] = (packed(x, None).double() - exact).square().mean().sqrt()
    assert (errors[2] != errors[3]) == is_fixed
    assert errors[3] < 1.05 * errors[2]


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_integers_fit(sign: int) -> None:
    """All codes are the largest of their block, and so are the inputs."""
    codes = torch.full((20, 640), 255, dtype=torch.uint8)
    assert_fixed_point_is_close(GroupedWeight(codes, 8, 64, torch.ones(20, 10) * sign), torch.ones(40, 640).bfloat16())


@pytest.mark.parametrize("place", ["scale", "minimum", "codebook"])
@pytest.mark.usefixtures("bf16_form")
def test_nan_in_a_weight_shows_in_the_result(place: str) -> None:
    """Many tokens are in fixed point in form 0, too."""
    codes, scales = torch.randint(0, 15, (40, 64), dtype=torch.uint8), torch.ones(40, 2)
    minimums, codebook = torch.ones(40, 2), FRACTIONAL_CODEBOOK.clone()
    codes[3, 5], codebook[15] = 15, float("nan")
    (scales if place == "scale" else minimums)[3, 0] = float("nan")
    if place == "codebook":
        weight = GroupedWeight(codes, 4, 32, torch.ones(40, 2), codebook=codebook)
    else:
        weight = GroupedWeight(codes, 4, 32, scales, offsets=minimums if place == "minimum" else None)
    result = pack_grouped(weight, "cpu")(torch.ones(97, 64).bfloat16(), None)
    assert result[:, 3].isnan().all()
    assert place == "codebook" or not result[:, [*range(3), *range(4, 40)]].isnan().any()


@pytest.mark.parametrize(
    ("num_tokens", "num_outputs", "num_inputs", "bits", "permuted"),
    [(580, 1632, 640, 4, False), (580, 1633, 640, 5, False), (2100, 96, 600, 4, True)],
    ids=["past the caches", "rows that are not aligned", "inputs in two parts"],
)
def test_products_of_many_tokens(num_tokens: int, num_outputs: int, num_inputs: int, bits: int, permuted: bool) -> None:
    """Large enough for several pieces of work, each with several stages of weights."""
    torch.manual_seed(0)
    weight = grouped_weight(num_outputs, num_inputs, bits, 64, "minimums", permuted=permuted)
    x, bias = torch.randn(num_tokens, num_inputs).bfloat16(), torch.randn(num_outputs).bfloat16()
    packed = pack_grouped(weight, "cpu")
    operands = packed.codes, packed.scales, packed.offsets, packed.codebook, packed.permutation
    actual = native.grouped_linear(x, *operands, bias, num_outputs, *form(packed))
    rounded, fixed_point = operands_rounded(weight, x.dtype, num_tokens), is_fixed_point(weight, x.dtype, num_tokens)
    assert_product_is_close(actual, x, weight, bias, operands_rounded=rounded, fixed_point=fixed_point)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("form", FORMS)
def test_bits_of_a_token_do_not_depend_on_others(form: str, bits: int) -> None:
    """Tokens that are multiplied together, with an odd number of tiles."""
    torch.manual_seed(0)
    x, bias = torch.randn(11, 320).bfloat16(), torch.randn(40).bfloat16()
    for group_size in (16, 32, 128):
        packed = pack_grouped(grouped_weight(40, 320, bits, group_size, form), "cpu")
        alone = torch.cat([packed(token, bias) for token in x.split(1)])
        for count in range(2, 12):
            assert torch.equal(packed(x[:count], bias), alone[:count])


@settings(max_examples=30, deadline=None)
@given(weight=weights(), dtype=st.sampled_from(DTYPES), num_ids=st.integers(0, 40))
def test_grouped_embedding(weight: GroupedWeight, dtype: torch.dtype, num_ids: int) -> None:
    ids = torch.randint(0, weight.shape[0], (num_ids,))
    packed = pack_grouped(weight, "cpu")
    if packed.permutation is not None:
        return
    for cpu in (native, fallback):
        actual = cpu.grouped_embedding(ids, *op_arguments(packed), *weight.shape, *form(packed), dtype)
        assert torch.equal(actual, reference.grouped_embedding(ids, weight, dtype))


@pytest.mark.parametrize("token_id", [-1, 20, 2**40])
def test_ids_that_are_not_rows_are_refused(token_id: int) -> None:
    packed = pack_grouped(GroupedWeight(torch.zeros(20, 64, dtype=torch.uint8), 4, 32, torch.ones(20, 2)), "cpu")
    with pytest.raises(IndexError, match=r"not rows of a table of 20"):
        packed.embed(torch.tensor([3, token_id]), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("bf16_form")
def test_a_bad_input_shows_in_the_result(dtype: torch.dtype) -> None:
    codes = torch.randint(0, 16, (20, 64), dtype=torch.uint8)
    packed = pack_grouped(GroupedWeight(codes, 4, 32, torch.ones(20, 2), zero_point=8), "cpu")
    x = torch.randn(3, 64).to(dtype)
    x[0, 5], x[2, 40] = float("nan"), float("inf")
    result = packed(x, None)
    assert not result[[0, 2]].isfinite().any()
    assert result[1].isfinite().all()


def test_bits_are_stored_without_waste() -> None:
    codes = torch.zeros(64, 256, dtype=torch.uint8)
    for bits in BITS:
        packed = pack_grouped(GroupedWeight(codes, bits, 32, torch.ones(64, 8).half()), "cpu")
        assert packed.nbytes == 64 * 256 * bits // 8 + 64 * 8 * 2


def test_packed_tensors_work_from_read_only_memory(tmp_path_factory: pytest.TempPathFactory) -> None:
    weight = GroupedWeight(torch.randint(0, 16, (40, 96), dtype=torch.uint8), 4, 32, torch.rand(40, 3).half())
    packed = pack_grouped(weight, "cpu")
    path = tmp_path_factory.mktemp("packed") / "codes"
    path.write_bytes(packed.codes.numpy().tobytes())
    mapped = torch.from_file(str(path), shared=False, size=packed.codes.numel(), dtype=torch.uint8)
    x = torch.randn(2, 96)
    codes = mapped.view(packed.codes.shape)
    arguments = (packed.scales, None, None, None, None, 40, *form(packed))
    assert torch.equal(native.grouped_linear(x, codes, *arguments), packed(x, None))


def test_wrong_codes_are_refused() -> None:
    packed = pack_grouped(GroupedWeight(torch.zeros(16, 64, dtype=torch.uint8), 4, 32, torch.ones(16, 2)), "cpu")
    with pytest.raises(ValueError, match=r"codes of shape .* are not those of 4-bit weights \[16, 96\]"):
        packed(torch.randn(1, 96), None)


def test_int8_weights_are_packed_as_groups() -> None:
    weight = Int8Weight(torch.randint(-128, 128, (48, 100), dtype=torch.int8), torch.rand(48))
    packed = pack(weight)
    assert isinstance(packed, PackedGrouped)
    assert torch.equal(grouped_layout.unpack(packed).dequantize(), weight.dequantize())


def random_fp8(num_outputs: int, num_inputs: int, *, blocks: bool, subnormal: bool = True) -> Fp8Weight:
    generator = torch.Generator().manual_seed(num_outputs + num_inputs)
    numbers = torch.randn(num_outputs, num_inputs, generator=generator)
    if subnormal:
        numbers[:, ::3] *= 2**-8  # below the smallest normal number
    else:
        numbers = numbers.abs().clamp(min=2**-6).copysign(numbers)
    scale_shape = (-(-num_outputs // 128), -(-num_inputs // 128)) if blocks else (num_outputs,)
    return Fp8Weight(numbers.to(torch.float8_e4m3fn), torch.rand(scale_shape, generator=generator) + 0.1)


@settings(max_examples=30, deadline=None)
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


@pairs(
    "bf16_form dtype kind num_inputs",
    BF16_FORMS,
    DTYPES,
    ["nf4", "groups of 96", "fp8", "fp8 blocks", "fp8, nothing subnormal"],
    [288, 1100],
    indirect=["bf16_form"],
)
def test_tables_of_numbers_in_every_form(bf16_form: int, dtype: torch.dtype, kind: str, num_inputs: int) -> None:
    """Several tiles of outputs are multiplied together, and the last one is not full; inputs of more
    than one stage, whose ends are not those of groups."""
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
    with pytest.raises(ValueError, match="no codebook of 8 bits that is not E4M3"):
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

"""Quantized weights on a CPU: the packed layout, products and rows, in C++ and in plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.quantized import BITS, E4M3, GroupedWeight
from pagewire.kernels.quantized.packed import pack_grouped, unpack_grouped
from tests.kernels.cpu.grouped_products import (
    DTYPES,
    FRACTIONAL_CODEBOOK,
    assert_product_is_close,
    form,
    is_fixed_point,
    op_arguments,
    operands_rounded,
    random_fp8,
    weights,
)
from tests.kernels.grouped_weights import FORMS, grouped_weight
from tests.kernels.implementations import fallback, native
from tests.kernels.processor import batch_invariance, bf16_multiplied_as
from tests.sweep import examples

pytestmark = pytest.mark.pairs


@settings(max_examples=examples(50), deadline=None)
@given(weight=weights())
def test_packing_loses_nothing(weight: GroupedWeight) -> None:
    packed = pack_grouped(weight, "cpu")
    unpacked = unpack_grouped(packed)
    assert torch.equal(unpacked.dequantize(), weight.dequantize())
    assert torch.equal(unpacked.codes, weight.codes)
    assert packed.shape == weight.shape
    for tensor in op_arguments(packed):
        assert tensor is None or tensor.is_contiguous()


@settings(max_examples=examples(70), deadline=None)
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


@settings(max_examples=examples(40), deadline=None)
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
    for bf16_form in (2, 3):
        with bf16_multiplied_as(bf16_form):
            is_fixed = is_fixed_point(weight, x.dtype, len(x))
            errors[bf16_form] = (packed(x, None).double() - exact).square().mean().sqrt()
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


@settings(max_examples=examples(40), deadline=None)
@given(
    weight=weights(),
    num_tokens=st.sampled_from([0, 1, 2, 7, 13, 40, 530]),
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
)
def test_gated_product_is_the_activation_of_sums(
    weight: GroupedWeight, num_tokens: int, dtype: torch.dtype, with_bias: bool
) -> None:
    weight = side_by_side(weight)
    num_outputs, num_inputs = weight.shape
    x = torch.randn(num_tokens, num_inputs, generator=torch.Generator().manual_seed(num_tokens)).to(dtype)
    bias = torch.linspace(-1, 1, num_outputs) if with_bias else None
    packed = pack_grouped(weight, "cpu")
    arguments = (*op_arguments(packed), packed.permutation, bias, num_outputs, *form(packed))
    for is_exact in {False, dtype is torch.float32}:
        sums = native.grouped_linear(x, *arguments, None if is_exact else torch.float32).float()
        gated = native.grouped_gated_linear(x, *arguments, is_exact)
        assert gated.dtype is dtype and gated.shape == (num_tokens, num_outputs // 2)
        expected = reference.silu_and_mul(sums, dtype)
        rounding = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}[dtype]
        torch.testing.assert_close(gated, expected, rtol=rounding, atol=1e-5)


def side_by_side(weight: GroupedWeight) -> GroupedWeight:
    """Returns a weight of twice the outputs: the weight's, and again in the opposite order."""

    def twice(rows: Tensor | None) -> Tensor | None:
        return None if rows is None else torch.cat([rows, rows.flip(0)])

    return replace(
        weight,
        codes=torch.cat([weight.codes, weight.codes.flip(0)]),
        scales=torch.cat([weight.scales, weight.scales.flip(0)]),
        super_scales=twice(weight.super_scales),
        offsets=twice(weight.offsets),
        super_offsets=twice(weight.super_offsets),
    )


@pytest.mark.parametrize("num_tokens", [1, 13, 40, 530])
def test_gates_of_whole_tiles(num_tokens: int) -> None:
    """Takes the way that sums gates side by side with what they multiply, on any number of threads."""
    torch.manual_seed(0)
    packed = pack_grouped(grouped_weight(224, 800, 4, 32, "minimums"), "cpu")
    x, bias = torch.randn(num_tokens, 800), torch.randn(224)
    gated = packed.gated(x, bias, torch.float32)
    torch.testing.assert_close(gated, reference.silu_and_mul(packed(x, bias, torch.float32)), rtol=1e-5, atol=1e-5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(packed.gated(x, bias, torch.float32), gated)
    finally:
        torch.set_num_threads(threads)
    with batch_invariance():
        gated = packed.gated(x, bias, torch.float32)
        for count in (1, 5, 12):
            assert torch.equal(packed.gated(x[:count], bias, torch.float32), gated[:count])


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


@settings(max_examples=examples(30), deadline=None)
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

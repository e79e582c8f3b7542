"""The experts' Triton kernels against the reference, in Triton's interpreter. Run by test_values.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels import reference
from pagewire.kernels.quantized.packed import PackedGrouped
from pagewire.kernels.triton.experts import blocks, combine, grouped_linear, linear, route, sort
from pagewire.kernels.triton.products import grouped_layout
from pagewire.kernels.triton.products.fp8_linear import multiplies_fp8
from tests.kernels.grouped_weights import grouped_weight
from tests.kernels.triton.grouped import NF4, configured
from tests.kernels.triton.interpreted import run_cases, some_of

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
F32, F16 = torch.float32, torch.float16
TOLERANCES = {F32: 1e-5, F16: 4e-3}


def routing(
    scoring: str,
    num_experts: int,
    top_k: int,
    groups: tuple[int, int, int] = (1, 1, 1),
    dtype: torch.dtype = F32,
    *,
    normalize: bool = False,
    bias: bool = False,
) -> None:
    """Rows far apart; ties, infinities and NaN among the logits."""
    logits = torch.full((9, num_experts + 16), float("nan"), dtype=dtype)[:, :num_experts]
    logits.copy_(torch.randn(9, num_experts))
    logits[0] = logits[0, 0]
    logits[1, ::2], logits[2], logits[3, 1] = float("nan"), float("nan"), float("-inf")
    correction = torch.randn(num_experts) if bias else None
    arguments = (logits, correction, top_k, scoring, normalize, 2.5, *groups)
    ids, weights = route.route_experts(*arguments)
    expected_ids, expected_weights = reference.route_experts(*arguments)
    torch.testing.assert_close(weights, expected_weights, atol=1e-5, rtol=1e-4, equal_nan=True)
    assert torch.equal(ids, expected_ids), (ids, expected_ids)
    assert route.route_experts(logits[:0], *arguments[1:])[0].shape == (0, top_k)


def chosen(num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Draws ids int32 [T, k]; some experts have no token, the first has most."""
    scores = torch.rand(num_tokens, num_experts)
    scores[:, 0] += 0.5
    scores[:, num_experts // 2 :: 3] -= 1
    return scores.argsort(dim=1, descending=True)[:, :top_k].int()


def sorting(num_tokens: int, top_k: int, num_experts: int) -> None:
    ids = chosen(num_tokens, top_k, num_experts)
    for actual, expected in zip(
        sort.sort_by_expert(ids, num_experts), reference.sort_by_expert(ids, num_experts), strict=True
    ):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def covering() -> None:
    """However pairs are spread, the blocks that a grid has room for are all of them."""
    for num_experts, block_m in ((1, 16), (8, 16), (60, 32)):
        for _ in range(50):
            counts = torch.randint(0, 40, (num_experts,)) * torch.randint(0, 2, (num_experts,))
            needed = int((-(-counts // block_m)).sum())
            assert needed <= blocks.num_blocks(int(counts.sum()), num_experts, block_m)


def combining(num_tokens: int, top_k: int, size: int, dtype: torch.dtype) -> None:
    y, weights = torch.randn(num_tokens * top_k, size).to(dtype), torch.rand(num_tokens, top_k)
    y[::3], weights.view(-1)[::3] = float("nan"), 0.0  # left out
    expected = reference.combine_experts(y, weights)
    torch.testing.assert_close(combine.combine_experts(y, weights), expected, atol=TOLERANCES[dtype], rtol=1e-3)


def rows(
    num_tokens: int, inputs: int, dtype: torch.dtype, num_experts: int, per_pair: bool, top_k: int = 2
) -> tuple[Tensor, ...]:
    """Returns (x with rows apart and NaN between them, order, starts); of one expert per token it is the
    same for all."""
    ids = chosen(num_tokens, top_k, num_experts) if top_k > 1 else torch.full((num_tokens, 1), 2, dtype=torch.int32)
    order, starts = reference.sort_by_expert(ids, num_experts)
    x = torch.full((num_tokens * (top_k if per_pair else 1), inputs + 8), float("nan"), dtype=dtype)[:, :inputs]
    return x.copy_(torch.randn(x.shape)), order, starts


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def dense(
    num_tokens: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype = F32,
    *,
    num_experts: int = 6,
    per_pair: bool = False,
    bias: bool = False,
    top_k: int = 2,
    gated: bool = False,
) -> None:
    x, order, starts = rows(num_tokens, inputs, dtype, num_experts, per_pair, top_k)
    weight = (torch.randn(num_experts * outputs, inputs) / inputs**0.5).to(dtype)
    offset = torch.randn(num_experts * outputs).to(dtype) if bias else None
    expected = reference.experts_linear(x, weight, offset, order, starts, gated)
    assert_close(linear.experts_linear(x, weight, offset, order, starts, gated), expected)


def fp8(
    num_tokens: int,
    outputs: int,
    inputs: int,
    *,
    block_scales: bool,
    bias: bool = False,
    quantized: bool = False,
    top_k: int = 2,
    per_pair: bool = False,
    gated: bool = False,
) -> None:
    """Checks products with fp8. quantized: whether there are so many pairs that x is, where fp8 is multiplied."""
    num_experts = 3 if top_k <= 3 else 8
    x, order, starts = rows(num_tokens, inputs, F16, num_experts, per_pair, top_k)
    quantized = quantized and multiplies_fp8(x.device)
    weight = torch.randn(num_experts * outputs, inputs).to(torch.float8_e4m3fn)
    blocks_of = (num_experts * outputs // 128, -(-inputs // 128))
    scales = (0.5 + torch.rand(blocks_of if block_scales else num_experts * outputs)) / inputs**0.5
    offset = torch.randn(num_experts * outputs).half() if bias else None
    expected, other = (
        reference.fp8_experts_linear(x.float(), weight, scales, None if offset is None else offset.float(), order,
                                     starts, gated, quantize_input=quantize).half()
        for quantize in (quantized, not quantized)
    )  # fmt: skip
    assert not torch.allclose(expected, other, atol=TOLERANCES[F16], rtol=TOLERANCES[F16])
    assert_close(linear.fp8_experts_linear(x, weight, scales, offset, order, starts, gated), expected)


def multiply(
    x: Tensor, packed: PackedGrouped, bias: Tensor | None, order: Tensor, starts: Tensor, gated: bool
) -> Tensor:
    return grouped_linear.grouped_experts_linear(
        x,
        packed.codes,
        packed.scales,
        packed.offsets,
        packed.codebook,
        bias,
        order,
        starts,
        packed.shape[0],
        packed.bits,
        packed.group_size,
        packed.zero_point,
        gated,
    )


def grouped(
    num_tokens: int,
    bits: int,
    group_size: int,
    form: str,
    *,
    outputs: int = 64,
    inputs: int = 256,
    dtype: torch.dtype = F16,
    per_pair: bool = False,
    bias: bool = False,
    codebook: Tensor | None = None,
    becomes_codes: bool = False,
    gated: bool = False,
    **config: int,
) -> None:
    """Checks products of groups. becomes_codes: the codebook does not outlive packing. config: of the table, in
    place of its values."""
    num_experts = 5
    x, order, starts = rows(num_tokens, inputs, dtype, num_experts, per_pair)
    weight = grouped_weight(num_experts * outputs, inputs, bits, group_size, form)
    if codebook is not None:
        weight = replace(weight, codebook=codebook, zero_point=0, scales=weight.scales * (8 / float(codebook.max())))
    offset = torch.randn(num_experts * outputs).to(dtype) if bias else None
    expected = reference.grouped_experts_linear(x, weight, offset, order, starts, gated)
    packed = grouped_layout.pack(weight)
    assert (packed.codebook is None) == (codebook is None or becomes_codes)
    with configured(**config):
        assert_close(multiply(x, packed, offset, order, starts, gated), expected)


CASES: dict[str, Callable[[], None]] = {
    "Mixtral's routing": partial(routing, "softmax", 8, 2, normalize=True),
    "Qwen's": partial(routing, "softmax", 60, 4, dtype=F16),
    "GPT-OSS's": partial(routing, "softmax_of_chosen", 32, 4),
    "DeepSeek-V2's": partial(routing, "softmax", 20, 6, (4, 2, 1)),
    "DeepSeek-V3's": partial(routing, "sigmoid", 64, 8, (8, 4, 2), normalize=True, bias=True),
    "groups of three": partial(routing, "sigmoid", 9, 2, (3, 2, 2), bias=True),
    "sorting": partial(sorting, 9, 2, 8),
    "sorting a pair": partial(sorting, 1, 1, 3),
    "sorting nothing": partial(sorting, 0, 2, 4),
    "sorting many": partial(sorting, 1200, 2, 12),
    "blocks": covering,
    "combining": partial(combining, 5, 3, 1100, F32),
    "combining fp16": partial(combining, 2, 8, 64, F16),
    "dense": partial(dense, 3, 48, 70),
    "dense, a row per pair": partial(dense, 9, 80, 64, per_pair=True, bias=True),
    "dense, 32 rows": partial(dense, 70, 48, 64, F16, bias=True),
    "dense, 64 rows": partial(dense, 120, 144, 80, F16, num_experts=4),
    "dense, 128 rows": partial(dense, 150, 16, 48, F16, num_experts=2),
    "dense, a token": partial(dense, 1, 48, 70, top_k=1),
    "dense, all to one": partial(dense, 40, 48, 64, F16, top_k=1),
    "dense, 6 each": partial(dense, 9, 48, 64, F16, num_experts=9, top_k=6),
    "dense, nothing": partial(dense, 0, 16, 32),
    "dense, gated": partial(dense, 9, 2 * 80, 64, gated=True, bias=True),
    "dense, gated, ragged, fp16": partial(dense, 70, 2 * 48, 70, F16, gated=True, num_experts=4),
    "dense, gated, a token": partial(dense, 1, 2 * 16, 70, gated=True, top_k=1),
    "dense, gated, nothing": partial(dense, 0, 2 * 16, 32, gated=True),
    "fp8": partial(fp8, 5, 48, 80, block_scales=False, bias=True),
    "fp8 in blocks": partial(fp8, 9, 128, 160, block_scales=True),
    "fp8, gated": partial(fp8, 5, 2 * 48, 80, block_scales=False, bias=True, gated=True),
    "fp8 in blocks, gated": partial(fp8, 9, 2 * 256, 160, block_scales=True, bias=True, gated=True),
    "fp8 in blocks of gates and ups": partial(fp8, 9, 2 * 64, 160, block_scales=True, gated=True),
    "fp8, quantized, gated": partial(fp8, 50, 2 * 48, 80, block_scales=False, bias=True, quantized=True, gated=True),
    "fp8 in blocks, quantized, gated": partial(
        fp8, 60, 2 * 128, 256, block_scales=True, bias=True, quantized=True, gated=True
    ),
    "fp8, quantized": partial(fp8, 50, 48, 80, block_scales=False, bias=True, quantized=True),
    "fp8 in blocks, quantized": partial(fp8, 60, 128, 256, block_scales=True, bias=True, quantized=True),
    "fp8 in blocks, quantized, all to one": partial(fp8, 140, 128, 80, block_scales=True, quantized=True, top_k=1),
    "fp8 in blocks, quantized, 8 each, a row per pair": partial(
        fp8, 34, 128, 300, block_scales=True, quantized=True, top_k=8, per_pair=True
    ),
    **some_of(
        {
            f"grouped {form}, groups of {group}, {bits} bits": partial(grouped, 7, bits, group, form, bias=bits == 8)
            for form, group, bits in (
                ("symmetric", 128, 4),
                ("zeros", 128, 4),
                ("minimums", 32, 4),
                ("super minimums", 32, 4),
                ("fp32 zeros", 1000, 4),
                ("supers", 16, 6),
                ("symmetric", 32, 8),
            )
        },
        2,
    ),
    "grouped, fp32, a row per pair": partial(grouped, 4, 4, 64, "zeros", dtype=F32, per_pair=True),
    "grouped, padded": partial(grouped, 4, 4, 32, "zeros", outputs=192, inputs=208, bias=True),
    "grouped, many rows": partial(grouped, 90, 4, 128, "zeros", outputs=192),
    "grouped, wide": partial(grouped, 30, 4, 128, "zeros", outputs=192, bias=True, wide=1, block_m=16, block_n=128),
    "grouped, nothing": partial(grouped, 0, 4, 32, "zeros"),
    **some_of(
        {
            f"grouped {form}, gated": partial(grouped, 7, bits, group, form, outputs=2 * 96, bias=bits == 8, gated=True)
            for form, group, bits in (
                ("symmetric", 128, 4),
                ("zeros", 128, 4),
                ("minimums", 32, 4),
                ("symmetric", 32, 8),
            )
        },
        2,
    ),
    **some_of(
        {
            f"grouped, wide, gated, {form}": partial(
                grouped, 30, 4, 128, form, outputs=2 * 96, bias=True, gated=True, wide=1, block_m=16, block_n=128
            )
            for form in ("symmetric", "zeros", "minimums")
        },
        2,
    ),
    "groups that do not fit, gated": partial(grouped, 4, 4, 48, "zeros", outputs=128, inputs=240, gated=True),
    "MXFP4": partial(grouped, 5, 4, 32, "fp32", codebook=E2M1, bias=True, becomes_codes=True),
    "a codebook of fractions": partial(grouped, 4, 4, 64, "symmetric", codebook=NF4),
    "groups that do not fit": partial(grouped, 4, 4, 48, "zeros", inputs=240),
}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, {}))

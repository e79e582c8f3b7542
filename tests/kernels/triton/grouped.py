"""The ops grouped_linear and grouped_embedding against the reference, in Triton's interpreter. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.grouped [--sweep]

in a process of its own, because Triton reads the variable when a kernel is defined; with --sweep, random combinations
instead (minutes). fp32 and fp16 only, bf16 is in `bf16.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from unittest import mock

import torch
from torch import Tensor

from pagewire.kernels import reference, tuning
from pagewire.kernels.quantized.packed import PackedGrouped
from pagewire.kernels.quantized.weights import BITS
from pagewire.kernels.triton.common import arrivals
from pagewire.kernels.triton.products import grouped_gemm, grouped_layout, grouped_linear
from tests.kernels.grouped_weights import FORMS, grouped_weight
from tests.kernels.triton.interpreted import run_cases, some_of

F32, F16 = torch.float32, torch.float16
TOLERANCES = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NEVER = 1 << 30
# What the tables would say for each way to multiply.
PATHS = {
    "gemm": {"library_rows": NEVER},
    "dense": {"library_rows": 1},
}
NF4 = torch.tensor([-1, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1])


@contextmanager
def configured(**values: int) -> Iterator[None]:
    """Within the block the tables' configurations with these values in place of theirs."""
    look_up = tuning.lookup

    def lookup(kernel: str, capability: int, **shape: int) -> dict[str, int]:
        config = dict(look_up(kernel, capability, **shape))
        return config | {name: value for name, value in values.items() if name in config}

    with mock.patch.object(tuning, "lookup", lookup):
        yield


def multiply(x: Tensor, packed: PackedGrouped, bias: Tensor | None, gated: bool = False) -> Tensor:
    return grouped_linear.grouped_linear(
        x,
        packed.codes,
        packed.scales,
        packed.offsets,
        packed.codebook,
        packed.permutation,
        bias,
        packed.shape[0],
        packed.bits,
        packed.group_size,
        packed.zero_point,
        gated=gated,
    )


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Results are about 1 large."""
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    for counters in arrivals._counters.values():
        assert not counters[-1].any(), "a program that arrived is still counted"


def product_case(
    path: str,
    num_tokens: int,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    form: str,
    dtype: torch.dtype = F16,
    *,
    permuted: bool = False,
    bias: bool = False,
    codebook: Tensor | None = None,
    gated: bool = False,
    **config: int,
) -> None:
    """Computes x has rows apart, and NaN between them."""
    weight = grouped_weight(*shape, bits, group_size, form, permuted=permuted)
    if codebook is not None:
        weight = replace(weight, codebook=codebook, zero_point=0, scales=weight.scales * 8)
    x = torch.full((num_tokens, shape[1] + 8), float("nan"), dtype=dtype)[:, : shape[1]]
    x.copy_(torch.randn(x.shape))
    offset = torch.randn(shape[0]).to(dtype) if bias else None
    expected = reference.grouped_linear(x, weight, offset)
    if gated:
        expected = reference.silu_and_mul(expected)
    with configured(**PATHS[path], **config):
        assert_close(multiply(x, grouped_layout.pack(weight), offset, gated), expected)


def split_case(path: str, **config: int) -> None:
    """The bits are the same whichever program comes last, and as without splits, but for rounding."""
    weight = grouped_weight(40, 1024, 4, 128, "zeros")
    packed, x = grouped_layout.pack(weight), torch.randn(2, 1024)
    expected = reference.grouped_linear(x, weight, None)
    results = []
    for tiles in (1, 3, 8):
        with (
            mock.patch.object(grouped_gemm, "split_tiles_of", lambda *_, tiles=tiles: tiles),
            configured(**PATHS[path], **config),
        ):
            results.append(multiply(x, packed, None))
            assert torch.equal(multiply(x, packed, None), results[-1])
    for result in results:
        assert_close(result, expected)


def exact_case() -> None:
    """Returns where every sum is exact, so are the products: activations of small integers, scales of powers of two."""
    wide = PATHS["gemm"] | {"wide": 1}
    for bits, form in ((4, "zeros"), (8, "symmetric")):
        weight = grouped_weight(66, 160, bits, 32, form)
        weight = replace(weight, scales=torch.full_like(weight.scales, 2.0**-6))
        x = torch.randint(-2, 3, (3, 160)).half()
        expected = reference.grouped_linear(x.float(), weight, None).half()
        for path in (*PATHS.values(), wide):
            with configured(**path):
                assert torch.equal(multiply(x, grouped_layout.pack(weight), None), expected)


def embedding_case(form: str, bits: int, group_size: int, dtype: torch.dtype, codebook: Tensor | None = None) -> None:
    weight = grouped_weight(70, 300, bits, group_size, form)
    if codebook is not None:
        weight = replace(weight, codebook=codebook, zero_point=0)
    packed = grouped_layout.pack(weight)
    token_ids = torch.tensor([[0, 69, 64], [63, 5, 5]])
    form_arguments = (packed.bits, packed.group_size, packed.zero_point)
    for ids in (token_ids, token_ids[0], token_ids[:0, 0]):
        actual = grouped_linear.grouped_embedding(
            ids, packed.codes, packed.scales, packed.offsets, packed.codebook, *packed.shape, *form_arguments, dtype
        )
        expected = reference.grouped_embedding(ids, weight, dtype)
        assert actual.shape == expected.shape
        assert torch.equal(actual, expected)


def no_tokens_case() -> None:
    packed = grouped_layout.pack(grouped_weight(10, 64, 4, 32, "zeros"))
    assert multiply(torch.randn(0, 64), packed, None).shape == (0, 10)


def fitting_case() -> None:
    """Groups that straddle planes of tiles are multiplied all the same."""
    assert not grouped_layout.groups_fit(4, 48, 480)
    assert all(grouped_layout.groups_fit(bits, group, 4096) for bits in (4, 8) for group in (16, 32, 64, 128, 256))
    assert grouped_layout.groups_fit(4, 100, 100)
    product_case("gemm", 3, (20, 200), 4, 48, "zeros")


CASES: dict[str, Callable[[], None]] = {
    **some_of(
        {
            f"gemm {form}, groups of {group}, {bits} bits": partial(
                product_case, "gemm", 3, (70, 200), bits, group, form
            )
            for form, group, bits in (
                ("symmetric", 128, 4),
                ("zeros", 128, 4),
                ("zeros", 32, 4),
                ("minimums", 32, 4),
                ("fp32 zeros", 64, 4),
                ("super minimums", 32, 4),
                ("symmetric", 1000, 4),
                ("zeros", 1000, 4),
                ("minimums", 1000, 4),
                ("supers", 16, 6),
                ("super minimums", 16, 2),
                ("symmetric", 128, 8),
                ("fp32 zeros", 32, 8),
            )
        }
    ),
    **some_of(
        {
            f"wide {form}, groups of {group}, {bits} bits": partial(
                product_case, "gemm", 3, (70, 200), bits, group, form, wide=1, block_n=128
            )
            for form, group, bits in (
                ("symmetric", 128, 4),
                ("zeros", 128, 4),
                ("zeros", 32, 4),
                ("fp32 zeros", 64, 4),
                ("super minimums", 32, 4),
                ("minimums", 1000, 4),
                ("super minimums", 16, 2),
                ("symmetric", 128, 8),
                ("fp32 zeros", 32, 8),
                ("supers", 16, 6),
            )
        }
    ),
    "wide, act-order, bias, several blocks": partial(
        product_case,
        "gemm",
        37,
        (200, 256),
        4,
        64,
        "zeros",
        permuted=True,
        bias=True,
        wide=1,
        block_m=16,
        block_n=128,
    ),
    # In blocks as the table has them.
    "wide, 130 rows": partial(product_case, "gemm", 130, (300, 520), 4, 128, "zeros", bias=True),
    "wide, 600 rows": partial(product_case, "gemm", 600, (300, 400), 4, 128, "symmetric"),
    "wide, 600 rows, groups of 32": partial(product_case, "gemm", 600, (130, 400), 4, 32, "minimums"),
    "wide fp32, narrow blocks": partial(
        product_case, "gemm", 20, (150, 130), 4, 32, "symmetric", F32, wide=1, block_m=16, block_n=32
    ),
    "gemm fp32": partial(product_case, "gemm", 5, (64, 256), 4, 64, "zeros", F32, bias=True),
    "gemm, permuted, bias": partial(product_case, "gemm", 9, (96, 256), 4, 64, "zeros", permuted=True, bias=True),
    "gemm, several blocks": partial(product_case, "gemm", 37, (200, 128), 4, 128, "zeros", block_m=16, block_n=128),
    "gemm, narrow blocks": partial(product_case, "gemm", 20, (150, 128), 4, 32, "minimums", block_m=8, block_n=32),
    "gemm fp32, one row, permuted, bias": partial(
        product_case, "gemm", 1, (40, 200), 4, 128, "zeros", F32, permuted=True, bias=True, block_n=32
    ),
    "dense, permuted, bias": partial(product_case, "dense", 4, (70, 200), 5, 32, "zeros", permuted=True, bias=True),
    "dense minimums": partial(product_case, "dense", 4, (70, 200), 3, 16, "super minimums", F32),
    "a codebook of fractions": partial(product_case, "gemm", 4, (70, 200), 4, 64, "symmetric", codebook=NF4),
    "splits": partial(split_case, "gemm"),
    "splits, wide": partial(split_case, "gemm", wide=1),
    **some_of(
        {
            f"{path}, gated, {outputs} outputs{', wide' * wide}": partial(
                product_case,
                path,
                3,
                (2 * outputs, 200),
                4,
                64,
                form,
                bias=True,
                gated=True,
                wide=wide,
                block_n=block_n,
            )
            for path in PATHS
            for outputs, form in ((72, "zeros"), (72, "minimums"), (37, "symmetric"))
            for wide, block_n in ((0, 32), (1, 128))
            if path == "gemm" or not wide
        }
    ),
    "splits, gated": partial(
        product_case, "gemm", 3, (2 * 24, 1024), 4, 128, "zeros", gated=True, programs_per_sm=16, block_n=32
    ),
    "exact": exact_case,
    "groups that do not fit": fitting_case,
    "no tokens": no_tokens_case,
    "embedding": partial(embedding_case, "zeros", 4, 128, F16),
    "embedding 6 bits, fp32": partial(embedding_case, "supers", 6, 16, F32),
    "embedding minimums": partial(embedding_case, "super minimums", 4, 32, F16),
    "embedding of a codebook": partial(embedding_case, "fp32", 4, 64, F32, NF4),
}


def random_case(seed: int) -> None:
    random = Random(seed)
    path = random.choice(list(PATHS))
    num_tokens = random.choice([1, 3, 8, 17, 33])
    product_case(
        path,
        num_tokens,
        (2 * random.randint(1, 100), random.randint(1, 500)),
        random.choice(BITS),
        random.choice([16, 32, 48, 64, 128, 256, 1000]),
        random.choice(FORMS),
        random.choice([F32, F16]),
        permuted=random.random() < 0.3,
        bias=random.random() < 0.5,
        block_n=random.choice([32, 64, 128]),
        block_m=random.choice([8, 16, 32]),
        wide=random.choice([0, 1]),
        gated=random.choice([False, True]),
        programs_per_sm=random.choice([1, 4, 16]),
    )


SWEEP: dict[str, Callable[[], None]] = {f"seed {seed}": partial(random_case, seed) for seed in range(150)}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, SWEEP))

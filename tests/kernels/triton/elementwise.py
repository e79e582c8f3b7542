"""The elementwise Triton kernels against the references, in Triton's interpreter on the CPU. Run by test_values.py as

    TRITON_INTERPRET=1 python -m tests.kernels.triton.elementwise [--sweep]

in a process of its own, because Triton reads the variable when a kernel is defined; with --sweep, random combinations
instead (minutes). fp32 and fp16 only: the interpreter rounds bf16 wrongly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from random import Random

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.kernels import ops, reference
from pagewire.kernels.triton.attention import kv_cache, rotary
from pagewire.kernels.triton.common import fp8
from pagewire.kernels.triton.elementwise import activation, layer_norm, norm
from tests.kernels.triton.interpreted import run_cases

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}
NAN = float("nan")
SENTINEL = 0x5A
FP8 = torch.float8_e4m3fn


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal as bytes, so that NaN counts as well."""
    actual, expected = actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    different = (actual != expected).nonzero()
    assert len(different) == 0, f"{len(different)} bytes differ, the first at {different[0].tolist()}"


# --- fp8 ---


@triton.jit
def encode_kernel(x_ptr, out_ptr, n, TILE: tl.constexpr):
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
    tl.store(out_ptr + offsets, fp8.e4m3_from_fp32(x, NATIVE=False), mask=offsets < n)


@triton.jit
def decode_kernel(x_ptr, out_ptr, TILE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    tl.store(out_ptr + offsets, fp8.e4m3_to_fp16(tl.load(x_ptr + offsets), NATIVE=False))


def fp8_encode_case() -> None:
    """All fp16 and bf16 values; every fp8 number, every tie between two, and the fp32 neighbours of both."""
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()].sort().values
    edges = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([464.0, -464.0, 1e30, 1e-45])])
    infinity = torch.tensor(float("inf"))
    neighbours = [torch.nextafter(edges, infinity), torch.nextafter(edges, -infinity)]
    x = torch.cat([codes.view(torch.float16).float(), codes.view(torch.bfloat16).float(), edges, *neighbours])
    actual = torch.full(x.shape, 1, dtype=torch.uint8)
    encode_kernel[(triton.cdiv(len(x), 8192),)](x, actual, len(x), TILE=8192)
    assert_same_bits(actual, x.clamp(-448, 448).to(FP8))


def fp8_decode_case() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    actual = torch.empty(256, dtype=torch.float16)
    decode_kernel[(1,)](codes, actual, TILE=256)
    expected = codes.view(FP8).to(torch.float16)
    assert_same_bits(actual[expected.isfinite()], expected[expected.isfinite()])


# --- the paged cache ---


def make_cache(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A cache of sentinel bytes: the second of a group of three layers."""
    shape = (num_blocks, 3, 2, num_kv_heads, block_size, head_dim * dtype.itemsize)
    return torch.full(shape, SENTINEL, dtype=torch.uint8).view(dtype)[:, 1]


def assert_other_layers_are_untouched(cache: Tensor) -> None:
    group = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).view(cache.shape[0], 3, -1)
    assert (group[:, (0, 2)] == SENTINEL).all()


def make_int8_cache(num_blocks: int, *page: int) -> tuple[Tensor, Tensor]:
    """The views of one, as `make_cache`."""
    pages = make_cache(num_blocks, 1, 1, ops.int8_page_bytes(*page) // 2, torch.int8)
    return ops.int8_pages(pages.view(num_blocks, -1), *page)


def make_slots(num_tokens: int, num_slots: int, padding: bool = True) -> Tensor:
    slots = torch.randperm(num_slots)[:num_tokens]
    if padding:
        slots[num_tokens // 2 :: 5] = -1
    return slots


def make_scales(num_kv_heads: int) -> Tensor:
    """Small enough that some values saturate."""
    return torch.rand(2, num_kv_heads) * 0.02 + 0.004


def fp8_ties_case() -> None:
    """Quotients that lie halfway between two fp8 numbers: a product with the reciprocal would miss some of them."""
    num_tokens, num_kv_heads, head_dim = 8, 16, 64
    scales = torch.arange(3, 3 + 4 * num_kv_heads, 2).view(2, num_kv_heads) / 2048
    shape = (num_tokens, num_kv_heads, head_dim)
    ties = [(torch.randint(8, 16, shape) + 0.5) * 2.0 ** torch.randint(-8, 5, shape) for _ in range(2)]
    key, value = (tie * scale[:, None] for tie, scale in zip(ties, scales, strict=True))  # exact
    actual = make_cache(1, num_kv_heads, 16, head_dim, FP8)
    expected = actual.clone()
    slots = torch.arange(num_tokens)
    kv_cache.store_kv(key, value, actual, slots, scales)
    reference.store_kv(key, value, expected, slots, scales)
    assert_same_bits(actual, expected)


def store_kv_case(
    dtype: torch.dtype, num_tokens: int, num_kv_heads: int, head_dim: int, cache_dtype: torch.dtype | None = None
) -> None:
    """Key and value are strided views of one projection's output; what padding tokens hold is NaN."""
    qkv = torch.randn(num_tokens, 4 * num_kv_heads, head_dim).to(dtype)
    slots = make_slots(num_tokens, num_tokens + 32)
    qkv[slots < 0] = NAN
    key, value = qkv[:, num_kv_heads : 2 * num_kv_heads], qkv[:, 3 * num_kv_heads :]
    scales = make_scales(num_kv_heads) if cache_dtype == FP8 else None
    actual = make_cache(-(-(num_tokens + 32) // 16), num_kv_heads, 16, head_dim, cache_dtype or dtype)
    expected = actual.clone()
    kv_cache.store_kv(key, value, actual, slots, scales)
    reference.store_kv(key, value, expected, slots, scales)
    assert_same_bits(actual, expected)
    assert_other_layers_are_untouched(actual)


def int8_case(
    dtype: torch.dtype, num_tokens: int, heads: tuple[int, int], head_dim: int, rotary_dim: int | None, norm: bool
) -> None:
    """Both ops with an int8 cache; rotary_dim None: store_kv. A head is zero, others hold what is not finite."""
    num_heads, num_kv_heads = heads
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    qkv[0, num_heads] = 0
    qkv[1, -1, 5], qkv[2, -1, 7] = NAN, float("inf")
    slots = make_slots(num_tokens, num_tokens + 32)
    slots[:3] = torch.arange(num_tokens + 32, num_tokens + 35)
    weights = [torch.randn(head_dim).to(dtype) if norm else None for _ in range(2)]
    cos_sin, positions = torch.randn(64, rotary_dim or head_dim), torch.randint(0, 64, (num_tokens,))
    page = (num_kv_heads, 16, head_dim)
    caches = [make_int8_cache(-(-(num_tokens + 35) // 16), *page) for _ in range(2)]
    for module, store, (cache, scales) in zip((rotary, reference), (kv_cache, reference), caches, strict=True):
        if rotary_dim is None:
            key, value = qkv[:, num_heads:].chunk(2, dim=1)
            store.store_kv(key, value, cache, slots, scales)
        else:
            module.rotary_store_kv(positions, qkv.clone(), cos_sin, cache, slots, *weights, 1e-5, scales)
    (actual, actual_scales), (expected, expected_scales) = caches
    assert actual_scales.isnan().equal(expected_scales.isnan())
    numbers = ~expected_scales.isnan()
    if not norm:
        assert actual_scales[numbers].equal(expected_scales[numbers])
        assert actual[numbers].equal(expected[numbers])
    else:
        torch.testing.assert_close(actual_scales[numbers].float(), expected_scales[numbers].float(), rtol=0.01, atol=0)
        assert (actual[numbers].int() - expected[numbers].int()).abs().max() <= 1
    assert_other_layers_are_untouched(actual)


def rotary_case(
    dtype: torch.dtype,
    num_tokens: int,
    heads: tuple[int, int],
    head_dim: int,
    rotary_dim: int | None = None,
    norm: bool = False,
    cache_dtype: torch.dtype | None = None,
    block_size: int = 16,
    weight_dtype: torch.dtype | None = None,
) -> None:
    """Bits equal the reference's without a norm (its sum may be rounded in another order)."""
    num_heads, num_kv_heads = heads
    cos_sin = torch.randn(64, rotary_dim or head_dim)
    weights = [torch.randn(head_dim).to(weight_dtype or dtype) if norm else None for _ in range(2)]
    scales = make_scales(num_kv_heads) if cache_dtype == FP8 else None
    slots = make_slots(num_tokens, num_tokens + 4 * block_size)
    positions = torch.randint(0, 64, (num_tokens,))
    # Rows are strided: eight elements of NaN lie between the last head of a token and the first of the next.
    width = (num_heads + 2 * num_kv_heads) * head_dim
    rows = torch.full((num_tokens, width + 8), NAN, dtype=dtype)
    rows[:, :width] = torch.randn(num_tokens, width).to(dtype)
    expected_rows = rows.clone()
    num_blocks = -(-num_tokens // block_size) + 4
    actual = make_cache(num_blocks, num_kv_heads, block_size, head_dim, cache_dtype or dtype)
    expected = actual.clone()
    for module, tensor, cache in ((rotary, rows, actual), (reference, expected_rows, expected)):
        qkv = tensor[:, :width].view(num_tokens, -1, head_dim)
        module.rotary_store_kv(positions, qkv, cos_sin, cache, slots, *weights, 1e-5, scales)
    queries = (slice(None), slice(0, num_heads * head_dim))
    if not norm:
        assert_same_bits(rows[queries], expected_rows[queries])
        assert_same_bits(actual, expected)
    else:
        assert_close(rows[queries], expected_rows[queries])
        assert_cache_close(actual, expected)
    assert_other_layers_are_untouched(actual)
    gap = (slice(None), slice(width, None))
    assert rows[gap].isnan().all()


def assert_cache_close(actual: Tensor, expected: Tensor) -> None:
    if expected.dtype != FP8:
        assert_close(actual, expected)
        return
    # Neighbouring fp8 numbers have neighbouring codes.
    distance = (actual.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert distance.max() <= 1, f"codes differ by {distance.max()}"
    assert (distance > 0).float().mean() < 0.01


def huge_offsets_case(cache_dtype: torch.dtype) -> None:
    """Block 2 lies more than 2^31 elements into the cache. The memory between the blocks is never touched."""
    num_kv_heads, block_size, head_dim, block_stride = 2, 16, 64, 2**30 + 2**20
    page = 2 * num_kv_heads * block_size * head_dim
    storage = torch.empty(2 * block_stride + page, dtype=cache_dtype)
    shape = (3, 2, num_kv_heads, block_size, head_dim)
    cache = storage.as_strided(shape, (block_stride, page // 2, block_size * head_dim, head_dim, 1))
    qkv = torch.randn(3, 4 + 2 * num_kv_heads, head_dim).half()
    slots = torch.tensor([2 * block_size + 5, -1, block_size + 15])
    scales = make_scales(num_kv_heads) if cache_dtype == FP8 else None
    expected = make_cache(2, num_kv_heads, block_size, head_dim, cache_dtype)
    cache[1:].view(torch.uint8).copy_(expected.view(torch.uint8))
    small_slots = torch.where(slots >= 0, slots - block_size, -1)
    positions, cos_sin = torch.tensor([7, 0, 3]), torch.randn(16, head_dim)
    reference.rotary_store_kv(positions, qkv.clone(), cos_sin, expected, small_slots, None, None, 0.0, scales)
    rotary.rotary_store_kv(positions, qkv, cos_sin, cache, slots, None, None, 0.0, scales)
    assert_same_bits(cache[1:], expected)
    key, value = qkv.narrow(1, 4, num_kv_heads), qkv.narrow(1, 4 + num_kv_heads, num_kv_heads)
    reference.store_kv(key, value, expected, small_slots, scales)
    kv_cache.store_kv(key, value, cache, slots, scales)
    assert_same_bits(cache[1:], expected)


# --- norm, activations ---


def norm_case(dtype: torch.dtype, num_tokens: int, size: int, residual_dtype: torch.dtype | None = None) -> None:
    x = torch.full((num_tokens, size + 8), NAN, dtype=dtype)[:, :size]  # strided
    x.copy_(torch.randn(num_tokens, size))
    residual, weight = torch.randn(num_tokens, size).to(residual_dtype or dtype), torch.randn(size).to(dtype)
    expected_residual = residual.clone()
    actual = norm.add_rms_norm(x, residual, weight, 1e-5)
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
    assert_same_bits(residual, expected_residual)
    assert_close(actual, expected)


def two_norms_case(dtype: torch.dtype, weight_dtype: torch.dtype, num_tokens: int, size: int) -> None:
    x = torch.full((num_tokens, size + 8), NAN, dtype=dtype)[:, :size]  # strided
    x.copy_(3 * torch.randn(num_tokens, size))
    residual = torch.randn(num_tokens, size).to(dtype)
    x_weight, weight = torch.randn(2, size).to(weight_dtype)
    expected_residual = residual.clone()
    actual = norm.norm_add_rms_norm(x, residual, x_weight, weight, 1e-5)
    assert_close(actual, reference.norm_add_rms_norm(x, expected_residual, x_weight, weight, 1e-5))
    assert_close(residual, expected_residual)
    plain = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert_close(plain, reference.add_rms_norm(x, expected_residual, weight, 1e-5))


def rms_norm_in_place_case(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    actual, weight = torch.randn(num_tokens, size + 8).to(dtype), torch.randn(size).to(dtype)
    expected = actual.clone()
    norm.rms_norm_(actual[:, 4:-4], weight, 1e-5)
    reference.rms_norm_(expected[:, 4:-4], weight, 1e-5)
    assert_close(actual, expected)
    assert_same_bits(actual[:, :4], expected[:, :4])


def layer_norm_case(dtype: torch.dtype, num_tokens: int, size: int, bias: bool) -> None:
    x = torch.full((num_tokens, size + 8), NAN, dtype=dtype)[:, :size]  # strided
    x.copy_(torch.randn(num_tokens, size) + 3)
    residual, weight, offset = torch.randn(num_tokens, size).to(dtype), torch.randn(size).to(dtype), None
    if bias:
        offset = torch.randn(size).to(dtype)
    expected_residual = residual.clone()
    assert_close(layer_norm.layer_norm(x, weight, offset, 1e-5), reference.layer_norm(x, weight, offset, 1e-5))
    actual = layer_norm.add_layer_norm(x, residual, weight, offset, 1e-5)
    expected = reference.add_layer_norm(x, expected_residual, weight, offset, 1e-5)
    assert_same_bits(residual, expected_residual)
    assert_close(actual, expected)


def activation_case(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    x = 3 * torch.randn(num_tokens, 2 * size).to(dtype)
    x[0, 0], x[0, 1] = -100.0, 100.0
    for name in ("silu_and_mul", "gelu_tanh_and_mul"):
        assert_close(getattr(activation, name)(x), getattr(reference, name)(x))
    assert_close(activation.clamped_swiglu(x, 1.7, 2.5), reference.clamped_swiglu(x, 1.7, 2.5))
    for name in ("gelu", "gelu_tanh"):  # rows of half a row of x
        assert_close(getattr(activation, name)(x[:, :size]), getattr(reference, name)(x[:, :size]))


F32, F16 = torch.float32, torch.float16
MANY = kv_cache.MANY_TOKENS + 5  # tokens enough for the large tiles, the last of them ragged
CASES: dict[str, Callable[[], None]] = {
    "fp8 encode": fp8_encode_case,
    "fp8 decode": fp8_decode_case,
    "store_kv": partial(store_kv_case, F16, 7, 3, 80),
    "store_kv fp32": partial(store_kv_case, F32, 3, 1, 96),
    "store_kv, many tokens": partial(store_kv_case, F16, MANY, 2, 64),
    "store_kv int8": partial(int8_case, F16, 21, (1, 5), 64, None, False),
    "store_kv int8, odd head_dim, many tokens": partial(int8_case, F16, MANY, (1, 3), 80, None, False),
    "rotary int8": partial(int8_case, F16, 21, (14, 2), 64, 64, False),
    "rotary int8, part of a head": partial(int8_case, F32, 9, (4, 2), 80, 48, False),
    "rotary norm int8": partial(int8_case, F16, 9, (8, 4), 96, 96, True),
    "store_kv fp8": partial(store_kv_case, F16, 21, 5, 64, FP8),
    "store_kv fp8, ties": fp8_ties_case,
    "rotary": partial(rotary_case, F32, 5, (9, 3), 64),
    "rotary fp16, multi-query": partial(rotary_case, F16, 4, (7, 1), 128, block_size=32),
    "rotary head_dim 80": partial(rotary_case, F16, 5, (4, 4), 80),
    "rotary head_dim 96, part of it": partial(rotary_case, F16, 3, (6, 2), 96, rotary_dim=40),
    "rotary head_dim 192, fp32": partial(rotary_case, F32, 3, (2, 2), 192, rotary_dim=64, block_size=64),
    "rotary, many tokens": partial(rotary_case, F16, MANY, (14, 2), 64),
    "rotary norm": partial(rotary_case, F32, 5, (16, 8), 128, norm=True),
    "rotary norm fp16, part of a head": partial(rotary_case, F16, 6, (5, 1), 80, rotary_dim=32, norm=True),
    "rotary norm fp16, many tokens": partial(rotary_case, F16, MANY, (4, 2), 64, norm=True),
    "rotary norm fp16, fp32 weights": partial(rotary_case, F16, 3, (4, 1), 256, norm=True, weight_dtype=F32),
    "rotary fp8": partial(rotary_case, F16, 21, (14, 2), 64, cache_dtype=FP8),
    "rotary fp8, part of a head": partial(rotary_case, F32, 9, (4, 2), 80, rotary_dim=48, cache_dtype=FP8),
    "rotary norm fp8": partial(rotary_case, F16, 9, (8, 4), 96, norm=True, cache_dtype=FP8),
    "huge block offsets": partial(huge_offsets_case, F16),
    "huge block offsets fp8": partial(huge_offsets_case, FP8),
    "add_rms_norm": partial(norm_case, F32, 4, 648),
    "add_rms_norm fp16": partial(norm_case, F16, 3, 4096),
    "add_rms_norm fp16, many rows": partial(norm_case, F16, norm.MANY_ROWS + 1, 72),
    "add_rms_norm fp16, residual in fp32": partial(norm_case, F16, 3, 648, F32),
    "add_rms_norm, one element": partial(norm_case, F32, 2, 1),
    "norm_add_rms_norm": partial(two_norms_case, F16, F16, 3, 640),
    "norm_add_rms_norm, fp32 weights": partial(two_norms_case, F16, F32, 2, 72),
    "rms_norm_": partial(rms_norm_in_place_case, F16, 3, 648),
    "layer_norm": partial(layer_norm_case, F32, 4, 648, bias=True),
    "layer_norm fp16, without bias": partial(layer_norm_case, F16, 3, 4096, bias=False),
    "layer_norm fp16, many rows": partial(layer_norm_case, F16, norm.MANY_ROWS + 1, 72, bias=True),
    "activations": partial(activation_case, F32, 3, 200),
    "activations fp16, several tiles": partial(activation_case, F16, 2, 2600),
}


def random_rotary_case(seed: int) -> None:
    random = Random(seed)
    dtype = random.choice([F32, F16])
    head_dim = random.choice([64, 80, 96, 128, 192, 256])
    num_kv_heads = random.randint(1, 5)
    rotary_case(
        dtype,
        random.choice([1, 2, 17, MANY]),
        (num_kv_heads * random.randint(1, 9), num_kv_heads),
        head_dim,
        rotary_dim=random.choice([head_dim, random.randrange(2, head_dim, 2)]),
        norm=random.random() < 0.5,
        cache_dtype=random.choice([None, FP8]),
        block_size=random.choice([16, 32, 64]),
    )


SWEEP: dict[str, Callable[[], None]] = {f"rotary, seed {seed}": partial(random_rotary_case, seed) for seed in range(50)}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, SWEEP))

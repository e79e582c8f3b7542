"""The ops rotary_store_kv and store_kv on the CPU, in C++ and plain torch."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pagewire.kernels import reference
from tests.kernels.batches import (
    LAYER,
    Heads,
    far_into_a_group,
    make_heads,
    make_int8_pages,
    one_layer_of_a_group,
)
from tests.kernels.implementations import fallback, native
from tests.sweep import examples

pytestmark = pytest.mark.pairs

# One unit in the last place, where C++ and torch round a different last bit of the fp32 value.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

implementations = pytest.mark.parametrize(
    "cpu", [native, fallback], ids=lambda module: module.__name__.rpartition(".")[2]
)
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@dtypes
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(9, 3, 64, 64), (4, 4, 80, 80), (8, 1, 64, 24), (2, 2, 128, 64), (1, 1, 24, 6)],
)
def test_rotary_store_kv(
    dtype: torch.dtype,
    norm: bool,
    cache: str,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
) -> None:
    actual = make_heads(dtype, num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, norm, cache)
    expected = actual.copy()
    native.rotary_store_kv(*actual.args())
    reference.rotary_store_kv(*expected.args())
    assert_close(actual.qkv[:, :num_heads], expected.qkv[:, :num_heads])
    if cache == "int8":  # half a step, and the last bit
        step = not_none(expected.kv_scales).float()[..., None]
        actual_cache, expected_cache = (dequantized(heads) for heads in (actual, expected))
        assert ((actual_cache - expected_cache).abs() <= step * 1.02 + TOLERANCES[dtype]).all()
    elif cache == "fp8":  # the neighbouring value, where the key differed in its last bit
        torch.testing.assert_close(actual.kv_cache.float(), expected.kv_cache.float(), rtol=0.13, atol=2**-9)
        different = (actual.kv_cache.float() != expected.kv_cache.float()).sum()
        assert different <= 2 + actual.kv_cache.numel() // 500
    else:
        assert_close(actual.kv_cache, expected.kv_cache)
    assert torch.equal(actual.kv_cache[:, 1].float(), expected.kv_cache[:, 1].float())  # values are not computed with


@dtypes
def test_norm_of_heads_with_fp32_weights(dtype: torch.dtype) -> None:
    actual = make_heads(dtype, 9, num_heads=4, num_kv_heads=1, head_dim=256, rotary_dim=256, norm=True)
    actual = replace(actual, q_weight=torch.randn(256), k_weight=torch.randn(256))
    expected = actual.copy()
    native.rotary_store_kv(*actual.args())
    reference.rotary_store_kv(*expected.args())
    assert_close(actual.qkv[:, :4], expected.qkv[:, :4])
    assert_close(actual.kv_cache, expected.kv_cache)


def test_rotation_is_that_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    qkv = torch.randn(5, 15, 64)
    query, key, _ = qkv.clone().split([9, 3, 3], dim=1)
    positions = torch.tensor([0, 1, 2, 77, 1000])
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 64, 2) / 64)
    twice = torch.cat([angles, angles], dim=1)[None]
    expected_query, expected_key = llama.apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], twice.cos(), twice.sin()
    )
    cos_sin = torch.zeros(1001, 64)
    cos_sin[positions] = torch.cat([angles.cos(), angles.sin()], dim=1)
    cache = torch.zeros(1, 2, 3, 16, 64)
    native.rotary_store_kv(positions, qkv, cos_sin, cache, torch.arange(5), None, None, 1e-5, None)
    torch.testing.assert_close(qkv[:, :9], expected_query[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(cache[0, 0, :, :5], expected_key[0], atol=1e-5, rtol=1e-5)


def test_rotary_store_kv_names_wrong_arguments() -> None:
    heads, ones = make_heads(torch.bfloat16, 4), torch.ones(64)
    for wrong, error, message in (
        (replace(heads, qkv=heads.qkv[:, :6]), ValueError, r"num_heads \+ 6, 64"),
        (replace(heads, qkv=heads.qkv.half()), TypeError, "without kv_scales kv_cache must be torch.float16"),
        (replace(heads, positions=heads.positions.int()), TypeError, "positions must be contiguous int64"),
        (replace(heads, slot_mapping=heads.slot_mapping[:3]), TypeError, "slot_mapping must be contiguous int64"),
        (replace(heads, cos_sin_cache=torch.zeros(9, 128)), ValueError, "at most 64 columns"),
        (
            replace(heads, q_weight=ones.half(), k_weight=ones.half()),
            ValueError,
            "must be contiguous torch.bfloat16 or torch.float32",
        ),
        (replace(heads, q_weight=ones.bfloat16()), ValueError, "both"),
        (replace(heads, q_weight=ones.bfloat16(), k_weight=ones), ValueError, "expected one dtype"),
        (
            replace(heads, kv_scales=torch.ones(2, 3)),
            TypeError,
            "with kv_scales kv_cache must be float8_e4m3fn or int8",
        ),
    ):
        with pytest.raises(error, match=message):
            native.rotary_store_kv(*wrong.args())


@implementations
@dtypes
def test_store_kv_writes_its_slots_and_nothing_else(cpu: ModuleType, dtype: torch.dtype) -> None:
    qkv = torch.randn(5, 15, 64).to(dtype)
    key, value = qkv[:, 9:12], qkv[:, 12:]
    cache = torch.zeros(7, 2, 3, 16, 64, dtype=dtype)
    slots = torch.tensor([3, 16, -1, 111, 47])
    cpu.store_kv(key, value, cache, slots, None)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(cache[slot // 16, 0, :, slot % 16], key[token])
            assert torch.equal(cache[slot // 16, 1, :, slot % 16], value[token])
            cache[slot // 16, :, :, slot % 16] = 0
    assert not cache.any()


@implementations
def test_fp8_is_torch_s_rounding_with_saturation(cpu: ModuleType) -> None:
    """Each value, the midpoints between neighbours and what is next to them, and arbitrary floats."""
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = exact[exact.isfinite()].sort().values
    middles = (finite[1:] + finite[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(direction)) for direction in (-1e9, 1e9)]
    beyond = torch.tensor([449.0, 464.0, 480.0, 1e30, float("inf")])
    arbitrary = torch.randint(-(2**31), 2**31, (50_000,)).int().view(torch.float32)
    values = torch.cat([exact, middles, *beside, beyond, -beyond, arbitrary])
    values = F.pad(values, (0, -len(values) % 32)).view(-1, 2, 1, 16)
    num_tokens = values.shape[0]
    cache = torch.zeros(num_tokens // 16 + 1, 2, 1, 16, 16).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0], [0.37]])
    cpu.store_kv(values[:, 0], values[:, 1], cache, torch.arange(num_tokens), scales)
    for index in range(2):
        stored = cache[:, index, 0].reshape(-1, 16)[:num_tokens]
        expected = (values[:, index, 0] / scales[index]).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(stored.float().isnan(), expected.float().isnan())
        numbers = ~expected.float().isnan()
        assert torch.equal(stored.view(torch.uint8)[numbers], expected.view(torch.uint8)[numbers])


NUMBERS = st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False) | st.floats(-2, 2, allow_subnormal=False)
ROWS = st.lists(st.lists(NUMBERS, min_size=24, max_size=24), min_size=1)


@settings(max_examples=examples(60), deadline=None)
@given(rows=ROWS, cpu=st.sampled_from([native, fallback]))
def test_int8_is_within_half_a_step_of_what_is_stored(rows: list[list[float]], cpu: ModuleType) -> None:
    """The scale is that of the row's largest number, whatever lies beside it; a row of zeros stays one."""
    values = torch.tensor(rows)[:, None, :]
    kv_cache, kv_scales = make_int8_pages(len(rows) // 8 + 1, 1, 8, 24)
    cpu.store_kv(values, -values, kv_cache, torch.arange(len(rows)), kv_scales)
    stored = (kv_cache.float() * kv_scales.float()[..., None]).transpose(0, 1).reshape(2, -1, 24)[:, : len(rows)]
    step = kv_scales.float().transpose(0, 1).reshape(2, -1, 1)[:, : len(rows)]
    assert torch.equal(stored[0], -stored[1]), "both signs are rounded alike"
    assert torch.equal(step[0, :, 0], (values.abs().amax(-1)[:, 0] / 127).bfloat16().float())
    normal = step[0] > 1e-37
    assert ((stored[0] - values[:, 0]).abs() <= step[0] * 0.5001)[normal[:, 0]].all()
    assert (stored[0] == 0)[(values == 0).all(-1)[:, 0]].all()


@implementations
@dtypes
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dim", [0, 37, 63])
def test_what_is_not_finite_shows_in_the_scale_of_its_row(
    cpu: ModuleType, dtype: torch.dtype, number: float, dim: int
) -> None:
    key, value = torch.randn(2, 3, 2, 64).to(dtype)
    key[1, 0, dim] = value[2, 1, dim] = number
    kv_cache, kv_scales = make_int8_pages(1, 2, 16, 64)
    cpu.store_kv(key, value, kv_cache, torch.arange(3), kv_scales)
    assert kv_scales.isnan().nonzero().tolist() == [[0, 0, 0, 1], [0, 1, 1, 2]]


def dequantized(heads: Heads) -> torch.Tensor:
    return heads.kv_cache.float() * not_none(heads.kv_scales).float()[..., None]


def test_store_kv_checks_shapes() -> None:
    cache = torch.zeros(4, 2, 3, 16, 64)
    with pytest.raises(ValueError, match="num_tokens, 3, 64"):
        native.store_kv(torch.zeros(2, 2, 64), torch.zeros(2, 2, 64), cache, torch.tensor([0, 1]), None)
    with pytest.raises(TypeError, match="int64"):
        slots = torch.tensor([0, 1], dtype=torch.int32)
        native.store_kv(torch.zeros(2, 3, 64), torch.zeros(2, 3, 64), cache, slots, None)


@pytest.mark.parametrize("cpu", [native, fallback, reference], ids=lambda module: module.__name__)
@dtypes
@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
def test_one_layer_of_a_group_is_written_and_no_other(cpu: ModuleType, dtype: torch.dtype, cache: str) -> None:
    alone = make_heads(dtype, 50, norm=True, cache=cache)
    group, view, scales = one_layer_of_a_group(alone.kv_cache, alone.kv_scales)
    others = group.clone()
    others[:, LAYER] = 0
    within = replace(alone.copy(), kv_cache=view, kv_scales=scales)
    key, value = alone.qkv[:, 9:12].clone(), alone.qkv[:, 12:].clone()
    for heads in (alone, within):
        cpu.rotary_store_kv(*heads.args())
        # Some slots once more, without rotation.
        cpu.store_kv(key[:7], value[:7], heads.kv_cache, heads.slot_mapping[:7], heads.kv_scales)
    assert torch.equal(bytes_of(view.contiguous()), bytes_of(alone.kv_cache.contiguous()))
    assert scales is None or torch.equal(scales, not_none(alone.kv_scales))
    group[:, LAYER] = 0
    assert torch.equal(bytes_of(group), bytes_of(others))


@pytest.mark.parametrize("cpu", [native, fallback], ids=lambda module: module.__name__)
@pytest.mark.parametrize("cache", ["", "fp8", "int8"])
def test_slots_beyond_32_bit_offsets(cpu: ModuleType, cache: str) -> None:
    near = make_heads(torch.bfloat16, 5, cache=cache)
    view, scales, shift = far_into_a_group(near.kv_cache, near.kv_scales)
    slots = torch.where(near.slot_mapping < 0, -1, near.slot_mapping + shift * 16)
    far = replace(near.copy(), kv_cache=view, kv_scales=scales, slot_mapping=slots)
    key, value = near.qkv[:2, 9:12].clone(), near.qkv[:2, 12:].clone()
    for heads in (near, far):
        cpu.rotary_store_kv(*heads.args())
        cpu.store_kv(key, value, heads.kv_cache, heads.slot_mapping[:2], heads.kv_scales)
    assert torch.equal(bytes_of(view[shift:].contiguous()), bytes_of(near.kv_cache.contiguous()))
    assert cache != "int8" or torch.equal(not_none(scales)[shift:], not_none(near.kv_scales))


def not_none(x: torch.Tensor | None) -> torch.Tensor:
    assert x is not None
    return x


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """NaN equals itself."""
    return x.view(torch.uint8)

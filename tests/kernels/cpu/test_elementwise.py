"""Norms, activations and dense products on the CPU, C++ and plain torch, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pagewire.kernels import reference
from tests.kernels.implementations import fallback, native
from tests.sweep import examples

# One unit in the last place, where C++ and torch round a different last bit of the fp32 value.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

dtypes = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, times: float = 1) -> None:
    tolerance = times * TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (3, 40), (70, 1000), (2, 5, 64), (0, 64)])
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual, weight = (torch.randn(s).to(dtype) for s in (shape, shape, shape[-1:]))
    expected_residual = x + residual
    actual = native.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert_close(actual, reference.rms_norm(expected_residual, weight, 1e-5))


@dtypes
def test_add_rms_norm_of_a_residual_in_fp32(dtype: torch.dtype) -> None:
    """Neither the addition nor the norm rounds the sum."""
    x, residual, weight = torch.randn(9, 1000).to(dtype), torch.randn(9, 1000), torch.randn(1000).to(dtype)
    total = x.float() + residual
    normed = torch.nn.functional.rms_norm(total, (1000,), None, 1e-5)
    for cpu in (native, fallback):
        stream = residual.clone()
        actual = cpu.add_rms_norm(x, stream, weight, 1e-5)
        assert torch.equal(stream, total)
        assert_close(actual, normed.to(dtype) * weight)


@dtypes
@pytest.mark.parametrize("shape", [(1, 640), (9, 40), (70, 1000), (0, 64)])
def test_norm_add_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Weights of the rows' dtype, and of fp32."""
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    for weight_dtype in {dtype, torch.float32}:
        x_weight, weight = torch.randn(2, shape[-1]).to(weight_dtype)
        actual_residual, expected_residual = residual.clone(), residual.clone()
        actual = native.norm_add_rms_norm(x, actual_residual, x_weight, weight, 1e-5)
        expected = reference.norm_add_rms_norm(x, expected_residual, x_weight, weight, 1e-5)
        assert_close(actual_residual, expected_residual)
        assert_close(actual, expected)


@dtypes
def test_norms_with_fp32_weights_are_gemmas(dtype: torch.dtype) -> None:
    gemma = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")
    inner, outer = (gemma.Gemma3RMSNorm(640, eps=1e-6).to(dtype) for _ in range(2))
    for norm in (inner, outer):
        norm.weight.data.normal_()
    x, residual = (torch.randn(6, 640).to(dtype) for _ in range(2))
    weights = [1 + norm.weight.data.float() for norm in (inner, outer)]
    total = residual + inner(x)
    for cpu in (native, fallback):
        stream = residual.clone()
        assert_close(cpu.norm_add_rms_norm(x, stream, *weights, 1e-6), outer(total).detach())
        assert_close(stream, total.detach())


@dtypes
def test_add_rms_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    norm = llama.LlamaRMSNorm(576, eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = torch.randn(6, 576).to(dtype)
    for cpu in (native, fallback):
        assert_close(cpu.add_rms_norm(x, torch.zeros_like(x), norm.weight.data, 1e-5), norm(x).detach())


@dtypes
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("shape", [(1, 3072), (5, 2 * 37), (40, 4096)])
def test_gated_activations(dtype: torch.dtype, name: str, shape: tuple[int, int]) -> None:
    x = (5 * torch.randn(shape)).to(dtype)
    x[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 0.0])  # the exponential neither overflows nor makes NaN
    # In fp64: the reference's 1 + tanh(u) cancels for negative gates, where the kernel's sigmoid does not.
    gate, up = x.double().chunk(2, dim=-1)
    gated = F.silu(gate) if name == "silu_and_mul" else F.gelu(gate, approximate="tanh")
    assert_close(getattr(native, name)(x), (gated * up).to(dtype))


@dtypes
@pytest.mark.parametrize("shape", [(1, 3072), (5, 2 * 37)])
def test_clamped_swiglu(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = (5 * torch.randn(shape)).to(dtype)
    x[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 0.0])
    assert_close(native.clamped_swiglu(x, 1.702, 7.0), reference.clamped_swiglu(x, 1.702, 7.0))


@dtypes
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 37), (5, 3072)])
def test_plain_activations(dtype: torch.dtype, name: str, shape: tuple[int, int]) -> None:
    x = (5 * torch.randn(shape)).to(dtype)
    x[0, :4] = torch.tensor([-200.0, 200.0, -30.0, 0.0])
    expected = F.gelu(x.double(), approximate="tanh" if name == "gelu_tanh" else "none")
    assert_close(getattr(native, name)(x), expected.to(dtype))


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (3, 43), (70, 1000), (0, 64)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layer_norm(dtype: torch.dtype, shape: tuple[int, int], with_bias: bool) -> None:
    """Far from zero, so that what lies beyond a ragged row's end would show in its variance.

    That costs digits: what is left of a number is a fraction of it.
    """
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight, bias = torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype) if with_bias else None
    x += 3
    total = x + residual
    assert_close(native.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5), times=5)
    actual = native.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(residual, total)
    assert_close(actual, reference.layer_norm(total, weight, bias, 1e-5), times=5)


@dtypes
def test_rms_norm_of_a_part_of_each_row_leaves_the_rest(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 100).to(dtype), torch.randn(40).to(dtype)
    before = x.clone()
    native.rms_norm_(x[:, 20:60], weight, 1e-5)
    assert_close(x[:, 20:60], reference.rms_norm(before[:, 20:60], weight, 1e-5))
    assert torch.equal(x[:, :20], before[:, :20]) and torch.equal(x[:, 60:], before[:, 60:])


@settings(max_examples=examples(60), deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    in_features=st.integers(1, 12).map(lambda n: 16 * n),
    out_features=st.integers(1, 150),
    dtype=st.sampled_from(list(TOLERANCES)),
    with_bias=st.booleans(),
    strided=st.booleans(),
)
def test_linear(
    num_tokens: int, in_features: int, out_features: int, dtype: torch.dtype, with_bias: bool, strided: bool
) -> None:
    generator = torch.Generator().manual_seed(num_tokens + in_features * out_features)
    x = torch.randn(num_tokens, 2 * in_features, generator=generator).to(dtype)
    x = x[:, :in_features] if strided else x[:, :in_features].contiguous()
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if with_bias else None
    actual = native.linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    tolerance = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("num_tokens", [2, 5, 6, 7, 16, 17, 32])
def test_a_few_tokens_have_in_fp32_what_each_has_alone(num_tokens: int) -> None:
    """Bit by bit: a draft is checked by the numbers that its token would have had."""
    x, weight = torch.randn(num_tokens, 200), torch.randn(70, 200)
    together = native.linear(x, weight, None)
    assert torch.equal(together, torch.cat([native.linear(token[None], weight, None) for token in x]))


@settings(max_examples=examples(40), deadline=None)
@given(
    num_tokens=st.one_of(st.integers(33, 64), st.integers(510, 520)),
    in_features=st.integers(1, 210),
    out_features=st.integers(1, 150),
    with_bias=st.booleans(),
)
def test_linear_of_many_tokens_in_fp32(num_tokens: int, in_features: int, out_features: int, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_tokens + in_features * out_features)
    x, weight = (torch.randn(n, in_features, generator=generator) for n in (num_tokens, out_features))
    bias = torch.randn(out_features, generator=generator) if with_bias else None
    actual = native.linear(x, weight, bias)
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(actual.double(), expected, atol=1e-6 * in_features, rtol=0)
    assert torch.equal(native.linear(x[5:], weight, bias)[:17], actual[5:22]) or num_tokens < 38, "depends on the batch"

"""The ops of layers with a state: C++ and plain torch against the reference, and the reference against a loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from pagewire.kernels import reference
from tests.kernels.implementations import fallback, native
from tests.kernels.state_batches import StateBatch
from tests.sweep import examples

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
OPS: dict[str, Callable[[StateBatch], tuple[Any, ...]]] = {
    "causal_conv": StateBatch.conv_args,
    "state_scan": StateBatch.scan_args,
}

# (tokens before, tokens of the step); -1: padding
requests = st.lists(st.tuples(st.integers(-1, 20), st.integers(1, 20)), min_size=1, max_size=5)


def assert_same(actual: StateBatch, expected: StateBatch, results: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Results, and all blocks: NaN where nothing was to be written."""
    tolerance = TOLERANCES[expected.projected.dtype]
    rows = expected.tokens()
    # A small result may be a sum of large terms, which are added in another order.
    size = max(1.0, float(results[1][rows].float().square().mean().sqrt()))
    torch.testing.assert_close(results[0][rows], results[1][rows], atol=tolerance * size, rtol=tolerance)
    for state in ("conv_state", "heads_state"):
        torch.testing.assert_close(
            getattr(actual, state), getattr(expected, state), atol=2e-5, rtol=2e-5, equal_nan=True
        )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("cpu", [native, fallback], ids=["cpp", "torch"])
@settings(max_examples=examples(40), deadline=None)
@given(
    requests=requests,
    state_tokens=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from(list(TOLERANCES)),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 3)]),
    head_dim=st.sampled_from([1, 8, 20]),
    size=st.sampled_from([16, 48, 128]),
    width=st.integers(2, 5),
    bias=st.booleans(),
    dt_limit=st.sampled_from([(0.0, math.inf), (0.2, 0.9)]),
)
def test_any_batch(
    cpu: ModuleType,
    op: str,
    requests: list[tuple[int, int]],
    state_tokens: int,
    dtype: torch.dtype,
    heads: tuple[int, int],
    **sizes: Any,
) -> None:
    options = {"state_tokens": state_tokens, "dtype": dtype, "num_heads": heads[0], "groups": heads[1], **sizes}
    actual, expected = (StateBatch.of(requests, **options) for _ in range(2))
    result = getattr(cpu, op)(*OPS[op](actual))
    assert_same(actual, expected, (result, getattr(reference, op)(*OPS[op](expected))))


def test_the_reference_is_the_recurrence() -> None:
    batch = StateBatch.of([(0, 11)], state_tokens=64, num_heads=2, groups=1, head_dim=3)
    x, dt, b, c, a, d, dt_bias, *_ = batch.scan_args()
    y = reference.state_scan(*batch.scan_args())
    for head in range(2):
        h = torch.zeros(3, 16)
        for t in range(11):
            step = math.log1p(math.exp(float(dt[t, head] + dt_bias[head])))
            h = h * math.exp(step * float(a[head])) + step * x[t, head, :, None] * b[t, 0]
            torch.testing.assert_close(y[t, head], h @ c[t, 0] + d[head] * x[t, head], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(batch.heads_state[batch.block_table[0, 0], head], h, atol=1e-5, rtol=1e-5)
    batch = StateBatch.of([(0, 11)], state_tokens=64, width=3)
    x, weight, bias, *_ = batch.conv_args()
    convolved = F.conv1d(F.pad(x.t(), (2, 0))[None], weight.t()[:, None], bias, groups=x.shape[1])[0].t()
    torch.testing.assert_close(reference.causal_conv(*batch.conv_args()), F.silu(convolved), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("op", OPS)
def test_steps_of_any_length_give_the_same_bits(op: str) -> None:
    """Neither a prefix hit nor a request that is computed again changes a token."""
    whole = StateBatch.of([(0, 30)], state_tokens=8, dtype=torch.bfloat16, size=32)
    parts = StateBatch.of([(0, 30)], state_tokens=8, dtype=torch.bfloat16, size=32)
    at_once = getattr(native, op)(*OPS[op](whole))
    results, tokens = [], parts.projected
    for start, end in ((0, 1), (1, 7), (7, 8), (8, 16), (16, 29), (29, 30)):
        parts.projected = tokens[start:end]
        parts.query_start_loc = torch.tensor([0, end - start], dtype=torch.int32)
        parts.seq_lens = torch.tensor([end], dtype=torch.int32)
        results.append(getattr(native, op)(*OPS[op](parts)))
    assert torch.equal(torch.cat(results), at_once)
    for state in ("conv_state", "heads_state"):
        assert torch.equal(getattr(parts, state).nan_to_num(), getattr(whole, state).nan_to_num())


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("size", "group_size"), [(64, 64), (96, 24), (1536, 768)])
def test_gated_rms_norm(dtype: torch.dtype, size: int, group_size: int) -> None:
    x, gate = torch.randn(2, 9, size + 5).to(dtype)[..., 5:]
    weight = torch.randn(size).to(dtype)
    gate[0, :3] = torch.tensor([-200.0, 200.0, 0.0])
    gated = (x.double() * F.silu(gate.double())).unflatten(1, (-1, group_size))
    expected = (gated / (gated.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(1) * weight.double()
    tolerance = TOLERANCES[dtype]
    for implementation in (native, reference):
        actual = implementation.gated_rms_norm(x, gate, weight, 1e-5, group_size)
        torch.testing.assert_close(actual, expected.to(dtype), atol=tolerance, rtol=tolerance)


def test_what_does_not_fit_is_refused() -> None:
    batch = StateBatch.of([(0, 3)])
    x, weight, bias, state, *places = batch.conv_args()
    with pytest.raises(ValueError, match="width must be 2 to 8"):
        native.causal_conv(x, weight[:1], bias, state, *places)
    with pytest.raises(ValueError, match=r"state must be float32 \[num_blocks, 3, 96\]"):
        native.causal_conv(x, weight, bias, state[:, :2], *places)
    with pytest.raises(ValueError, match="96 is not a multiple of group_size 50"):
        native.gated_rms_norm(x, x, weight[0], 1e-5, 50)

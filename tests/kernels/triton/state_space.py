"""The Triton kernels of layers with a state against the reference, in Triton's interpreter. Run by test_values.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from pagewire.kernels import reference
from pagewire.kernels.triton.state_space import conv, gated_norm, scan
from tests.kernels.state_batches import StateBatch
from tests.kernels.triton.interpreted import run_cases

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3}


def states(
    requests: Sequence[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    state_tolerance: float = 2e-5,
    **options: Any,
) -> None:
    """Both ops; requests as of `StateBatch.of`. state_tolerance: what tiles add to states has x's dtype."""
    actual, expected = (StateBatch.of(requests, dtype=dtype, **options) for _ in range(2))
    results = (
        (conv.causal_conv(*actual.conv_args()), reference.causal_conv(*expected.conv_args())),
        (scan.state_scan(*actual.scan_args()), reference.state_scan(*expected.scan_args())),
    )
    tolerance, rows = TOLERANCES[dtype], expected.tokens()
    for result, truth in results:
        torch.testing.assert_close(result[rows], truth[rows], atol=tolerance, rtol=tolerance)
    for state in ("conv_state", "heads_state"):  # NaN where nothing is written
        kept, truth = getattr(actual, state), getattr(expected, state)
        torch.testing.assert_close(kept, truth, atol=state_tolerance, rtol=state_tolerance, equal_nan=True)


def norm(size: int, group_size: int, dtype: torch.dtype = torch.float32) -> None:
    x, gate = torch.randn(2, 7, size + 3).to(dtype)[..., 3:]
    weight = torch.randn(size).to(dtype)
    actual = gated_norm.gated_rms_norm(x, gate, weight, 1e-5, group_size)
    expected = reference.gated_rms_norm(x, gate, weight, 1e-5, group_size)
    torch.testing.assert_close(actual, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


CASES: dict[str, Callable[[], None]] = {
    "decode": partial(states, [(0, 1), (5, 1), (8, 1), (23, 1)]),
    "decode in fp16": partial(states, [(7, 1), (5, 1)], dtype=torch.float16),
    "prompts and their rests": partial(states, [(0, 9), (16, 3), (0, 1), (3, 5)]),
    "over several blocks": partial(states, [(6, 21), (0, 33)]),
    "over several tiles": partial(states, [(5, 70), (0, 40), (33, 1)], state_tokens=64),
    "over several tiles in fp16": partial(
        states, [(5, 70), (0, 9)], state_tokens=16, dtype=torch.float16, head_dim=64, size=32, state_tolerance=1e-2
    ),
    "padding": partial(states, [(4, 2), (-1, 3), (0, 2), (-1, 1)]),
    "blocks that are smaller than the convolution": partial(states, [(1, 2), (0, 5), (6, 1)], state_tokens=1, width=5),
    "one group, no bias, bounds": partial(
        states, [(3, 10), (8, 2)], groups=1, num_heads=3, bias=False, dt_limit=(0.2, 0.9), width=2
    ),
    "sizes of Mamba-2": partial(states, [(2, 3), (0, 2)], num_heads=2, groups=1, head_dim=64, size=128),
    "heads of other sizes": partial(states, [(2, 3), (0, 12)], head_dim=20, size=32),
    "more elements than a program has": partial(states, [(2, 20), (3, 2)], num_heads=2, groups=1, head_dim=128),
    "more channels than a program has": partial(states, [(2, 3), (0, 18)], num_heads=10, head_dim=32),
    "norm": partial(norm, 96, 96),
    "norm of groups": partial(norm, 1536, 192, torch.float16),
}


if __name__ == "__main__":
    sys.exit(run_cases(CASES, {}))

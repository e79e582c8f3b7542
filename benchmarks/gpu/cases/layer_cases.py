"""Products of few rows in 16 bits, with a layer's norm and SiLU or without, beside the launches that they replace."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cases.case import IN_TURN, OURS, Built, Case, Contestant, Target, in_turn
from benchmarks.gpu.measure import num_sets, relative_error
from pagewire.kernels import ops, reference

# Llama-3.1-8B: QKV, output, gate and up, down; Qwen2.5-0.5B: gate and up. (outputs, inputs)
SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (9728, 896))
NUM_TOKENS = (1, 8, 16, 64)
EPS = 1e-5
# Ours must not lose to what would be launched instead; and beginning early must be worth it.
_TARGETS = (Target("ratio", 1.0, 1.1, "torch"),)
_NORMED_TARGETS = (Target("ratio", 1.0, 1.2, "apart"), Target("ratio", 1.0, 1.1, IN_TURN))


def cases(device: torch.device, small: bool) -> Iterator[Case]:
    dtype = torch.float32 if small else torch.bfloat16
    for num_outputs, num_inputs in ((96, 64),) if small else SHAPES:
        for num_tokens in NUM_TOKENS:
            yield _plain(num_tokens, num_outputs, num_inputs, dtype, device)
            yield _normed(num_tokens, num_outputs, num_inputs, dtype, device)


def _plain(num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> Case:
    num_bytes = (num_outputs * num_inputs + num_tokens * (num_outputs + num_inputs)) * dtype.itemsize

    def build() -> Built:
        x = torch.randn(num_tokens, num_inputs, device=device).to(dtype)
        weights = _weights(num_outputs, num_inputs, num_bytes, dtype, device)

        def error() -> float:
            expected = reference.linear(x.float(), weights[0].float(), None)
            return relative_error(ops.linear(x, weights[0], None, None), expected)

        return Built(
            {
                OURS: Contestant([partial(ops.linear, x, weight, None, None) for weight in weights], error),
                "torch": Contestant([partial(F.linear, x, weight) for weight in weights], None),
            }
        )

    return Case("products", f"linear {num_outputs}x{num_inputs} M={num_tokens}", num_bytes, build, 0, _TARGETS)


def _normed(num_tokens: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> Case:
    """num_outputs: gates and ups."""
    num_bytes = (num_outputs * num_inputs + num_tokens * (num_outputs // 2 + 4 * num_inputs)) * dtype.itemsize

    def build() -> Built:
        x, residual = torch.randn(2, num_tokens, num_inputs, device=device).to(dtype)
        norm, updated = torch.randn(num_inputs, device=device).to(dtype), torch.empty_like(residual)
        weights = _weights(num_outputs, num_inputs, num_bytes, dtype, device)

        def ours(weight: Tensor) -> Tensor:
            return ops.normed_linear(x, residual, updated, norm, EPS, weight, None, True)

        def apart(weight: Tensor) -> Tensor:
            return ops.silu_and_mul(F.linear(ops.add_rms_norm(x, updated, norm, EPS, None), weight), None)

        def error() -> float:
            given = (residual.float(), torch.empty_like(residual, dtype=torch.float32), norm.float())
            return relative_error(
                ours(weights[0]), reference.normed_linear(x.float(), *given, EPS, weights[0].float(), None, True)
            )

        contestants = {
            OURS: Contestant([partial(ours, weight) for weight in weights], error),
            "apart": Contestant([partial(apart, weight) for weight in weights], None),
        }
        if device.type == "cuda":
            contestants[IN_TURN] = in_turn(contestants[OURS].calls)
        return Built(contestants)

    name = f"norm, linear, SiLU {num_outputs}x{num_inputs} M={num_tokens}"
    return Case("products", name, num_bytes, build, 0, _NORMED_TARGETS)


def _weights(
    num_outputs: int, num_inputs: int, num_bytes: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    first = (torch.randn(num_outputs, num_inputs, device=device) / num_inputs**0.5).to(dtype)
    return [first, *(first.clone() for _ in range(num_sets(num_bytes, device) - 1))]

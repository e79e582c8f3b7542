"""The Triton kernels of adapters against the reference, in Triton's interpreter. Run by test_values.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from hypothesis import given, settings

from pagewire.kernels.triton import adapters
from tests.kernels.adapter_batches import AdapterBatch, adapter_batches
from tests.kernels.triton.interpreted import run_cases

F32, F16 = torch.float32, torch.float16


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(batch=adapter_batches((F32, F16), max_rank=40))
def random_batches(batch: AdapterBatch) -> None:
    batch.check(adapters.add_adapters)


def mixed(dtype: torch.dtype, x_dtype: torch.dtype | None = None) -> None:
    """Tokens with and without adapters in any order; parts that a block of outputs divides; ranks of all kinds."""
    slots = [0, 2, -1, 1, 1, 2, 0, -1, 2, *[-1] * 23, 0, 1]
    ranks = [[20, 0, 3], [1, 20, 16], [0, 0, 17]]
    batch = AdapterBatch.random(
        slots, dtype, inputs=1100, outputs=(100, 30, 140), rank=20, ranks=ranks, x_dtype=x_dtype, gap=8
    )
    batch.check(adapters.add_adapters)


def many() -> None:
    """Checks so many tokens that programs look for slots one after the other; a token's result is as among few."""
    slots = [0] * 200 + [-1] * 40 + [1] * 50
    batch = AdapterBatch.random(slots, F32, inputs=40, outputs=(48,), rank=8)
    batch.check(adapters.add_adapters)
    chosen = [3, 199, 201, 289]
    few = batch.of_tokens(chosen).run(adapters.add_adapters)
    assert torch.equal(few, batch.run(adapters.add_adapters)[chosen])


def of_experts() -> None:
    """Pairs sorted by many slots, of which neighbours have one or some that follow each other."""
    slots = sorted([-1] * 17 + [5] * 20 + [6, 9, 9, 10, 30] + list(range(31, 60)) + [150] * 7 + [199] * 190)
    batch = AdapterBatch.random(slots, F32, inputs=40, outputs=(24, 24), rank=4)
    batch.check(adapters.add_adapters)


CASES: dict[str, Callable[[], None]] = {
    "random": random_batches,
    "mixed fp32": partial(mixed, F32),
    "mixed fp16": partial(mixed, F16),
    "fp32 inputs of fp16 weights": partial(mixed, F16, F32),
    "many": many,
    "of experts": of_experts,
}

if __name__ == "__main__":
    sys.exit(run_cases(CASES))

"""Attention of one shape on random buffers: the calls that are timed, and how far they are from the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.measure import Call, num_sets, relative_error
from pagewire.kernels import ops, reference
from pagewire.kernels.ops import ROW_ALIGNMENT
from pagewire.kernels.triton.attention import paged_attention

# query heads per KV head -> KV heads, as in models that have such groups
NUM_KV_HEADS = {1: 16, 2: 8, 3: 3, 4: 8, 5: 8, 7: 4, 8: 8, 16: 2}
KV_SCALE = 0.01  # of fp8 caches

Buffers = Mapping[str, Any]  # arguments of paged_attention


@dataclass(frozen=True)
class Problem:
    """Requests of equal length; one call per set of buffers."""

    inputs: list[Buffers]
    query_len: int
    tolerance: float
    expected: Tensor  # of the first set

    def calls(self) -> list[Call]:
        """Returns calls with one plan for all, which the first one makes: a step makes it once for all layers."""
        plans: list[Tensor | None] = []

        def call(buffers: Buffers) -> Tensor:
            if not plans:
                plans.append(self._plan(buffers))
            return _attend(paged_attention, buffers, self.query_len, plans[0])

        return [partial(call, buffers) for buffers in self.inputs]

    def _plan(self, buffers: Buffers) -> Tensor | None:
        names = ("query", "kv_cache", "block_table", "query_start_loc", "seq_lens")
        batch = {name: buffers[name] for name in names}
        return ops.plan_attention(
            **batch, max_query_len=self.query_len, min_query_len=self.query_len, sliding_window=0, split_size=0
        )

    def is_right(self) -> bool:
        actual = _attend(paged_attention, self.inputs[0], self.query_len)
        return relative_error(actual, self.expected) <= self.tolerance


def _attend(module: ModuleType, buffers: Buffers, query_len: int, plan: Tensor | None = None) -> Tensor:
    result: Tensor = module.paged_attention(
        **buffers,
        max_query_len=query_len,
        min_query_len=query_len,
        sliding_window=0,
        soft_cap=0.0,
        sinks=None,
        split_size=0,
        plan=plan,
    )
    return result


def attention_problem(shape: Mapping[str, int], context_len: int, device: torch.device) -> Problem:
    """`shape` has the keys of the attention tables (`pagewire.kernels.tuning`)."""
    seq_len = context_len + shape["query_len"]
    num_pages = -(-seq_len // shape["block_size"])
    num_kv_heads = NUM_KV_HEADS[shape["group"]]
    page_bytes = 2 * num_kv_heads * shape["block_size"] * shape["head_dim"] * shape["kv_bytes"]
    sets = num_sets(shape["batch"] * num_pages * page_bytes, device)
    inputs = [_buffers(shape, num_kv_heads, num_pages, seq_len, device) for _ in range(sets)]
    expected = _attend(reference, inputs[0], shape["query_len"])
    return Problem(inputs, shape["query_len"], 1e-4 if shape["kv_bytes"] == 4 else 1e-2, expected)


def _buffers(
    shape: Mapping[str, int], num_kv_heads: int, num_pages: int, seq_len: int, device: torch.device
) -> Buffers:
    batch, query_len, head_dim = shape["batch"], shape["query_len"], shape["head_dim"]
    num_blocks = batch * num_pages
    half = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies no bf16
    dtype = torch.float32 if shape["kv_bytes"] == 4 else half
    kv_cache = torch.randn((num_blocks, 2, num_kv_heads, shape["block_size"], head_dim), device=device, dtype=dtype)
    kv_scales = None
    if shape["kv_bytes"] == 1:
        kv_cache = (kv_cache / KV_SCALE).clamp_(-reference.FP8_MAX, reference.FP8_MAX).to(torch.float8_e4m3fn)
        kv_scales = torch.full((2, num_kv_heads), KV_SCALE, device=device)
    return {
        "query": torch.randn(batch * query_len, shape["group"] * num_kv_heads, head_dim, device=device).to(dtype),
        "kv_cache": kv_cache,
        "block_table": _aligned(torch.randperm(num_blocks, device=device).view(batch, num_pages).int()),
        "query_start_loc": torch.arange(0, batch * query_len + 1, query_len, device=device, dtype=torch.int32),
        "seq_lens": torch.full((batch,), seq_len, device=device, dtype=torch.int32),
        "scale": head_dim**-0.5,
        "kv_scales": kv_scales,
    }


def _aligned(table: Tensor) -> Tensor:
    """With rows as long as the executor's."""
    return torch.nn.functional.pad(table, (0, -table.shape[1] % ROW_ALIGNMENT))

"""Attention kernels to measure ours against, each as a call per buffer set: torch's and FlashAttention 3.

Every peer gets the KV cache in the layout it likes best, made beforehand: torch's kernel contiguous keys and values
(the gather from pages is not in its time), FlashAttention 3 its own page layout. What it plans on the host is not in
its time either, but printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.cases.attention_inputs import TOLERANCE, AttentionInputs, error
from benchmarks.gpu.cases.case import Contestant
from benchmarks.gpu.measure import Call
from benchmarks.gpu.peer_kernels import files as peer_files


def contestant(calls: list[Call], inputs: AttentionInputs, planning_seconds: float = 0.0) -> Contestant:
    """Checked like ours; what the calls return is `_flat`'s to read."""
    return Contestant(calls, lambda: error(_flat(calls[0](), inputs), inputs), TOLERANCE, planning_seconds)


def _planned(plan: Callable[[], object]) -> float:
    """Plans twice; seconds of the second time, until the device is done. The first one may compile."""
    plan()
    torch.cuda.synchronize()
    started = time.perf_counter()
    plan()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _flat(output: Any, inputs: AttentionInputs) -> Tensor:
    """[num_tokens, num_heads, head_dim], also from heads before tokens, and from groups folded into the query."""
    shape = inputs.shape
    if output.dim() == 4:
        query_len, num_reqs = inputs.max_query_len, len(shape.seq_lens)
        output = output.reshape(num_reqs, shape.num_heads, query_len, shape.head_dim).transpose(1, 2)
    return output.reshape(-1, shape.num_heads, shape.head_dim)


def contiguous_kv(inputs: AttentionInputs, index: int) -> Tensor:
    """Returns keys and values [2, num_reqs, num_kv_heads, seq_len, head_dim] of a uniform batch."""
    pages = inputs.kv_caches[index][
        inputs.block_table.long()
    ]  # [num_reqs, num_pages, 2, num_kv_heads, block, head_dim]
    num_reqs, num_pages, _, num_kv_heads, block_size, head_dim = pages.shape
    gathered = pages.permute(2, 0, 3, 1, 4, 5).reshape(2, num_reqs, num_kv_heads, num_pages * block_size, head_dim)
    return gathered[:, :, :, : inputs.shape.seq_lens[0]].contiguous()


def _heads_first(inputs: AttentionInputs, index: int) -> Tensor:
    """[num_reqs, num_heads, query_len, head_dim] of a uniform batch."""
    query = inputs.queries[index].view(
        len(inputs.shape.seq_lens), inputs.max_query_len, *inputs.queries[index].shape[1:]
    )
    return query.transpose(1, 2).contiguous()


def sdpa(inputs: AttentionInputs) -> Contestant:
    """Returns torch's scaled_dot_product_attention. The heads of a group become the query of one token."""
    calls: list[Call] = []
    shape, query_len = inputs.shape, inputs.max_query_len
    for index in range(len(inputs.queries)):
        key, value = contiguous_kv(inputs, index)
        query = _heads_first(inputs, index)
        if query_len == 1:
            query = query.reshape(len(shape.seq_lens), shape.num_kv_heads, -1, shape.head_dim)
            calls.append(partial(F.scaled_dot_product_attention, query, key, value, scale=inputs.scale))
        elif query_len == shape.seq_lens[0]:
            calls.append(
                partial(
                    F.scaled_dot_product_attention,
                    query,
                    key,
                    value,
                    is_causal=True,
                    scale=inputs.scale,
                    enable_gqa=True,
                )
            )
        else:
            raise peer_files.PeerMissingError("torch's SDPA has no fast kernel for a causal query behind a context")
    return contestant(calls, inputs)


def fa3(inputs: AttentionInputs) -> Contestant:
    """FlashAttention 3 over pages; how it splits is found out beforehand."""
    ops, shape = peer_files.fa3(), inputs.shape
    max_seq_len = max(shape.seq_lens)

    def plan() -> Tensor:
        schedule: Tensor = ops.get_scheduler_metadata(
            len(shape.seq_lens), inputs.max_query_len, max_seq_len, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, shape.head_dim, shape.dtype, inputs.seq_lens, inputs.query_start_loc, None, None, None,
            None, shape.block_size, 0, True, -1, -1, False, 0, None, 0,
        )  # fmt: skip
        return schedule

    schedule, planning_seconds = plan(), _planned(plan)

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = ops.fwd(
            query, key, value, None, None, None, None, inputs.query_start_loc, None, None, None, inputs.seq_lens,
            inputs.max_query_len, max_seq_len, inputs.block_table, None, None, None, None, None, None, None, None,
            inputs.scale, True, -1, -1, 0.0, True, schedule, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip
        return output

    calls: list[Call] = []
    for query, cache in zip(inputs.queries, inputs.kv_caches, strict=True):
        # Its pages are [block_size, num_kv_heads, head_dim].
        key, value = (cache[:, part].transpose(1, 2).contiguous() for part in (0, 1))
        calls.append(partial(call, query, key, value))
    return contestant(calls, inputs, planning_seconds)


# By the names that `attention_cases` has them under.
PEERS: dict[str, Callable[[AttentionInputs], Contestant]] = {"sdpa": sdpa, "fa3": fa3}

"""The op paged_attention on CUDA: argument checks, and the choice of kernels and their configurations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pagewire.kernels import tuning
from pagewire.kernels.ops import SHORT_QUERY
from pagewire.kernels.triton.attention.attention_tile import as_stored
from pagewire.kernels.triton.attention.decode_attention import decode_attention
from pagewire.kernels.triton.attention.kv_cache import check_scales
from pagewire.kernels.triton.attention.prefill_attention import configuration, prefill_attention
from pagewire.kernels.triton.attention.split_plan import plan_for

# The shape that is looked up in a table for fixed splits, where no configuration may depend on the batch.
_FIXED_BATCH = 64
_FIXED_QUERY_LEN = 1024


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    min_query_len: int,
    scale: float,
    sliding_window: int,
    soft_cap: float,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
    split_size: int,
    plan: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Computes `reference.paged_attention`. The heads of a token of query, and each block of kv_cache, are contiguous.

    Short queries go to one kernel, long ones to another; only a batch of both launches both. With split_size, and many
    long requests, the decode kernel's scratch memory is up to num_reqs * max_blocks * block_size / split_size partial
    rows of num_heads * head_dim fp32.
    """
    assert dtype in (None, query.dtype), "the result has query's dtype"
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_reqs = seq_lens.shape[0]
    if query.shape[0] == 0 or num_reqs == 0:
        return out
    _check(query, kv_cache, block_table, query_start_loc, seq_lens, kv_scales, sinks)
    stored = as_stored(kv_cache)
    capability = tuning.capability_of(query.device)
    if min_query_len <= SHORT_QUERY:
        config = _decode_config(query, kv_cache, block_table, max_query_len, split_size)
        decode_attention(
            query, stored, out, block_table, query_start_loc, seq_lens, max_query_len, scale, sliding_window, soft_cap,
            kv_scales, sinks, split_size, config, plan=plan,
        )  # fmt: skip
    if max_query_len > SHORT_QUERY:
        query_len = _FIXED_QUERY_LEN if split_size else _next_power_of_2(max_query_len)
        # With at least this many long queries. The number of requests does not tell: most may decode, or be a graph's
        # padding.
        num_long = query.shape[0] // max_query_len
        shape = _shape(query, kv_cache, num_long, split_size)
        shape["query_len"] = query_len
        config = configuration(capability, shape, kv_cache.dtype, sliding_window)
        prefill_attention(
            query, stored, out, block_table, query_start_loc, seq_lens, scale, sliding_window, soft_cap, kv_scales,
            sinks, config,
        )  # fmt: skip
    return out


def plan_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    sliding_window: int,
    split_size: int,
) -> Tensor | None:
    """Makes the plan that `pagewire.kernels.ops.plan_attention` returns."""
    if query.shape[0] == 0 or seq_lens.shape[0] == 0:
        return None
    return plan_for(
        query, kv_cache, block_table, query_start_loc, seq_lens, max_query_len, sliding_window, split_size,
        _decode_config(query, kv_cache, block_table, max_query_len, split_size),
    )  # fmt: skip


def _decode_config(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, max_query_len: int, split_size: int
) -> Mapping[str, int]:
    shape = _shape(query, kv_cache, block_table.shape[0], split_size)
    # As the decode kernel chooses its tile: for decodes if there are long queries, or a fixed one.
    query_len = 1 if split_size or max_query_len > SHORT_QUERY else max_query_len
    shape |= {"query_len": query_len, "context": block_table.shape[1] * kv_cache.shape[3]}
    return tuning.lookup("decode_attention", tuning.capability_of(query.device), **shape)


def _shape(query: Tensor, kv_cache: Tensor, num_reqs: int, split_size: int) -> dict[str, int]:
    """What the tables of both kernels are asked for."""
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    return {
        "head_dim": head_dim,
        "group": query.shape[1] // num_kv_heads,
        "block_size": block_size,
        "kv_bytes": kv_cache.dtype.itemsize,
        "batch": _FIXED_BATCH if split_size else _next_power_of_2(num_reqs),
    }


def _next_power_of_2(n: int) -> int:
    """Triton's own takes microseconds."""
    return 1 << (n - 1).bit_length()


def _check(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    kv_scales: Tensor | None,
    sinks: Tensor | None,
) -> None:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size, cache_head_dim = kv_cache.shape[2:]
    assert head_dim == cache_head_dim, "query and kv_cache differ in head_dim"
    assert head_dim % 8 == 0, "head_dim must be a multiple of 8"
    assert block_size & (block_size - 1) == 0, "block_size must be a power of two"
    assert num_heads % num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads"
    assert query.stride(2) == 1 and query.stride(1) == head_dim, "the heads of a token must be contiguous"
    assert query.stride(0) % 8 == 0, "tokens of query must begin at multiples of 8 elements"
    assert kv_cache.stride(0) % 16 == 0, "blocks must begin at multiples of 16 elements"
    page = block_size * head_dim
    assert kv_cache.stride()[1:] == (num_kv_heads * page, page, head_dim, 1), "blocks must be contiguous"
    assert block_table.dtype == query_start_loc.dtype == seq_lens.dtype == torch.int32, "tables must be int32"
    has_scales = kv_cache.dtype in (torch.float8_e4m3fn, torch.int8)
    assert has_scales or kv_cache.dtype == query.dtype, "kv_cache has the dtype of query, or 8 bits"
    check_scales(kv_cache, kv_scales)
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.shape == (num_heads,)), "sinks: fp32 [num_heads]"

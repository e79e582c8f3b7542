"""Attention over the paged KV cache by torch's fused attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import reference


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
    """Computes `reference.paged_attention` by torch's fused attention, per request; a soft cap, scales and sinks
    take the reference."""
    if soft_cap > 0 or kv_scales is not None or sinks is not None:
        return reference.paged_attention(
            query,
            kv_cache,
            block_table,
            query_start_loc,
            seq_lens,
            max_query_len,
            min_query_len,
            scale,
            sliding_window,
            soft_cap,
            kv_scales,
            sinks,
            split_size,
            plan,
            dtype,
        )
    query = query.to(kv_cache.dtype)  # torch multiplies tensors of one dtype
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    output = torch.zeros_like(query, dtype=dtype)
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    for b, seq_len in enumerate(lengths):
        start, end = starts[b], starts[b + 1]
        query_len = end - start
        if query_len == 0 or seq_len == 0:
            continue
        # Whole pages that no query token of this request can see are not gathered.
        first_page = 0
        if sliding_window > 0:
            first_page = max(0, seq_len - query_len + 1 - sliding_window) // block_size
        pages = kv_cache[block_table[b, first_page : -(-seq_len // block_size)].long()]
        num_keys = seq_len - first_page * block_size
        key, value = pages.permute(1, 2, 0, 3, 4).reshape(2, 1, num_kv_heads, -1, head_dim)[:, :, :, :num_keys]
        if query_len == 1:
            # The heads that share a KV head become query rows of it: one pass over the keys instead of one per head.
            rows = query[start].view(1, num_kv_heads, num_heads // num_kv_heads, head_dim)
            mask = reference.visible(1, num_keys, sliding_window, query.device)
            result = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
            output[start] = result.view(num_heads, head_dim)
        else:
            rows = query[start:end].transpose(0, 1)[None]
            mask = reference.visible(query_len, num_keys, sliding_window, query.device)
            result = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
            output[start:end] = result[0].transpose(0, 1)
    return output

"""Attention over paged KV: what a step tells every attention layer, and the layer's call into the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagewire.kernels import ops


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's ragged batch. Request b's query tokens are `query_start_loc[b] : query_start_loc[b + 1]`.

    Example, block_size 4: request 0 decodes its 6th token, request 1 prefills 3 tokens of an empty context:

        query_start_loc = [0, 1, 4]    seq_lens = [6, 3]    block_table = [[7, 2], [5, -]]
        slot_mapping    = [9, 20, 21, 22]                   max_query_len = 3
    """

    query_start_loc: Tensor  # int32 [num_reqs + 1]
    seq_lens: Tensor  # int32 [num_reqs], context_len + query_len; 0 = padding
    block_table: Tensor  # int32 [num_reqs, max_blocks], batch_idx -> ordered block ids
    slot_mapping: Tensor  # int64 [num_tokens], -1 = padding
    max_query_len: int
    split_size: int = 0  # tokens of context per attention program; 0 = chosen on the device from all lengths


class PagedAttention:
    """Causal attention of one layer over its own KV cache; `kv_cache` is bound after the cache is allocated."""

    __slots__ = ("kv_cache", "kv_scales", "scale", "sliding_window", "soft_cap")

    kv_cache: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim]

    def __init__(self, scale: float, sliding_window: int = 0, soft_cap: float = 0.0) -> None:
        self.scale = scale
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap
        self.kv_scales: Tensor | None = None  # fp32 [2, num_kv_heads], of keys and of values; fp8 caches only

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn: AttentionMetadata) -> Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]."""
        ops.store_kv(key, value, self.kv_cache, attn.slot_mapping, self.kv_scales)
        return self.attend(query, attn)

    def attend(self, query: Tensor, attn: AttentionMetadata) -> Tensor:
        """As `__call__`, with keys and values already in the cache."""
        return ops.paged_attention(
            query,
            self.kv_cache,
            attn.block_table,
            attn.query_start_loc,
            attn.seq_lens,
            attn.max_query_len,
            self.scale,
            self.sliding_window,
            self.soft_cap,
            self.kv_scales,
            attn.split_size,
        )

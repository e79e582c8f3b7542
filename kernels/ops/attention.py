"""Attention over the paged KV cache, and ops that write the cache.

`kv_cache` is one layer's [num_blocks, 2, num_kv_heads, block_size, head_dim], 0 = keys, 1 = values. Each page
[2, num_kv_heads, block_size, head_dim] is contiguous; the stride between pages is free, so that it may be one layer's
view `group[:, layer]` of a cache [num_blocks, layers, 2, ...] that several layers share.

A cache of 8 bits has scales (`kv_scales`), which stored keys and values are multiplied with:

- float8_e4m3fn: fp32 [2, num_kv_heads], given by the caller; what is stored saturates at +-448.
- int8: bf16 [num_blocks, 2, num_kv_heads, block_size], a scale per token and head, which lies in the page behind its
  keys and values (`int8_pages`) and is written with them: the largest magnitude / 127, rounded to bf16. What is divided
  by it is rounded to nearest. A head of zeros has the scale 0, one with a number that is not finite the scale NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.ops.definition import op

MAX_HEAD_DIM = 256  # of every implementation; head_dim is a multiple of 8
# Queries of up to this many tokens are short: on CUDA they have a separate kernel.
SHORT_QUERY = 16
# Rows of block tables begin at multiples of this many ids: few loads then give a tile of keys (128, in pages of 16).
ROW_ALIGNMENT = 8
_SCALE = torch.bfloat16  # of a token in int8: a rounded scale costs no exactness, as it is what is divided by


def int8_page_bytes(num_kv_heads: int, block_size: int, head_dim: int) -> int:
    """Returns the bytes of a page in int8, scales included."""
    return 2 * num_kv_heads * block_size * (head_dim + _SCALE.itemsize)


def int8_pages(pages: Tensor, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns kv_cache and kv_scales, views of int8 [num_blocks, int8_page_bytes], in which pages are contiguous."""
    rows, size, stride = (2, num_kv_heads, block_size), num_kv_heads * block_size * head_dim, pages.stride(0)
    kv_cache = pages.as_strided((len(pages), *rows, head_dim), (stride, size, block_size * head_dim, head_dim, 1))
    scales = pages.view(_SCALE)
    strides = (stride // _SCALE.itemsize, num_kv_heads * block_size, block_size, 1)
    first = scales.storage_offset() + 2 * size // _SCALE.itemsize
    return kv_cache, scales.as_strided((len(pages), *rows), strides, first)


@op()
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
    dtype: torch.dtype | None,
) -> Tensor:
    """Causal attention of a ragged batch over a paged KV cache.

    query            [num_tokens, num_heads, head_dim]
    kv_cache         of the result's dtype, or float8_e4m3fn or int8 with kv_scales
    block_table      int32 [num_reqs, max_blocks]; entries past a request's length are never used, nor those of blocks
                     that lie before the window of its first query token
    query_start_loc  int32 [num_reqs + 1]
    seq_lens         int32 [num_reqs], context_len + query_len; 0 = padding
    max_query_len    the longest query of the batch (a launch hint)
    min_query_len    the shortest, padding aside (a launch hint: no program starts for queries that there are not)
    sliding_window   0 = off
    soft_cap         0 = off
    kv_scales        of a cache of 8 bits
    sinks            fp32 [num_heads]: a score per head, of a key without a value, which takes its share of the softmax
    split_size       tokens of context that one program reduces: fixed, the result of a request is bitwise independent
                     of the rest of the batch; 0 = chosen on the device from all lengths (no other effect)
    plan             what `plan_attention` made of such tensors; None: the op plans by itself, if it has to
    dtype            the result's; None: query's. On CPUs the query may be fp32 where it is of 16 bits
    returns          [num_tokens, num_heads, head_dim]; tokens of no request are undefined

    Query token i of a request stands at position p = seq_len - query_len + i and attends to positions
    max(0, p - sliding_window + 1) .. p (0 .. p without a window). `soft_cap` c > 0 replaces the scaled scores s by
    c * tanh(s / c).
    """
    return query.new_empty(query.shape, dtype=dtype)


@op(mutates=("kv_cache", "kv_scales"))
def store_kv(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_scales: Tensor | None,
) -> None:
    """Write key and value [num_tokens, num_kv_heads, head_dim] to their slots.

    key, value    of kv_cache's dtype, unless it is of 8 bits; on CPUs they may be fp32
    slot_mapping  int64 [num_tokens]; -1 = padding, skipped
    kv_scales     of a cache of 8 bits, as the module describes them; written if it is int8
    """


@op(mutates=("qkv", "kv_cache", "kv_scales"))
def rotary_store_kv(
    positions: Tensor,
    qkv: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    kv_scales: Tensor | None,
) -> None:
    """Normalise query and key per head (with weights), rotate both, store key and value in the cache.

    positions           int64 [num_tokens]
    qkv                 [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; the query heads are changed in place, what
                        the key heads hold afterwards is undefined; of kv_cache's dtype, unless it is of 8 bits; on CPUs
                        it may be fp32
    cos_sin_cache       fp32 [max_position, rotary_dim] = cat(cos, sin)
    q_weight, k_weight  [head_dim], both or none: RMS norm with eps comes first; of qkv's dtype, or fp32, with which the
                        product is rounded only once
    slot_mapping, kv_scales as in `store_kv`
    """

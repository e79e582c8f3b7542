"""One tile of paged attention, shared by the decode and the prefill kernel: queries against BLOCK_N keys of a request.

Rows of a tile are (query token, head of the group) pairs, so the query heads that share a KV head read it once. A tile
of keys is a whole number of pages, or an aligned part of one page. Scores are kept in powers of two (log2(e) is folded
into the scale), so that weights are exp2.

A head size that is no power of two is cut in two where padding would waste much: 80 and 96 are in 64 + 32, 192 in
128 + 64. The first part has DIMS elements, the second REST (0 = none); every `*_rest` below is the second part's.

Values of an fp8 cache are read as pairs of neighbours, 16 bits each: no instruction transposes bytes on their way from
shared memory to the tensor cores. Then `acc` holds the even elements of a head and `acc_rest` the odd ones, until
`in_order` puts them together. (With an fp8 cache REST is 0.)

Keys and values of an int8 cache are exact in the dtype of the query. Their scales, one per token, lie in the pages
behind them: scores are multiplied with those of keys, weights with those of values.

Latent vectors (LATENT_DIM > 0) are keys and, in their first LATENT_DIM elements, values: they are read once. KV heads
are then groups of query heads that see the same keys.

The two kernels repeat each other's lines before the loop and the call of `attend` in it. They are two programs
because one that branches between short and long queries loses its software pipelining; a helper for those lines
would return a dozen values.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels import ops
from pagewire.kernels.triton.attention.pages import page_offsets, page_pointers
from pagewire.kernels.triton.common import fp8

LOG2E = tl.constexpr(1.4426950408889634)
# Queries of up to this many tokens are the decode kernel's, longer ones the prefill kernel's.
SHORT_QUERY = tl.constexpr(ops.SHORT_QUERY)
# The largest score of a row that has seen no key: finite, so that no difference of two is NaN.
NO_KEY = tl.constexpr(-1e30)

_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


# As kernels see a cache of 8 bits, and its scales.
_STORED = {torch.float8_e4m3fn: ("*u8", "*fp32"), torch.int8: ("*i8", "*bf16")}


def argument_types(
    types: dict[str, str], dtype: torch.dtype, kv_dtype: torch.dtype, sinks: bool
) -> tuple[dict[str, str], dict[str, None]]:
    """Returns the Triton types of a kernel's arguments, and the arguments that are absent."""
    element = f"*{_TYPES[dtype]}"
    cache, scales = _STORED.get(kv_dtype, (element, ""))
    types = types | {"query_ptr": element, "out_ptr": element, "kv_cache_ptr": cache, "kv_scales_ptr": scales}
    absent = dict.fromkeys(["kv_scales_ptr"] * (not scales) + ["sinks_ptr"] * (not sinks))
    return types | dict.fromkeys(absent, "constexpr"), absent


def head_parts(head_dim: int, fp8_cache: bool, latent_dim: int) -> tuple[int, int]:
    """Returns (DIMS, REST): powers of two that hold head_dim elements with little padding, REST 0 if one does. A latent
    vector is cut behind its value.

    No REST of 16: where a result has 16 rows and 16 columns, Triton has every warp compute all of it.
    """
    if latent_dim > 0:
        dims = max(16, triton.next_power_of_2(latent_dim))
        return dims, 0 if dims >= head_dim else max(32, triton.next_power_of_2(head_dim - dims))
    whole = max(32 if fp8_cache else 16, triton.next_power_of_2(head_dim))
    first = whole // 2
    rest = max(32, triton.next_power_of_2(head_dim - first))
    return (whole, 0) if fp8_cache or first + rest >= whole else (first, rest)


def as_stored(kv_cache: Tensor) -> Tensor:
    """Returns the cache as kernels see it: fp8 as bytes (see `pagewire.kernels.triton.common.fp8`)."""
    return kv_cache.view(torch.uint8) if kv_cache.dtype == torch.float8_e4m3fn else kv_cache


@triton.jit
def token_and_head(rows, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Returns the query token and the head of the group of each row of a tile."""
    if BLOCK_Q == 1:
        return rows * 0, rows
    return rows // GROUP, rows % GROUP


@triton.jit
def repeated(rows, ROWS: tl.constexpr):
    """Returns rows below ROWS as they are, and one of these for others."""
    return tl.minimum(rows % triton.next_power_of_2(ROWS), ROWS - 1)


@triton.jit
def load_rows(
    pointers,  # [rows]
    offsets,  # int32 [rows], in elements: each row's vector of HEAD_DIM elements begins at pointers + offsets
    in_rows,  # [rows]; looked at where MASKED
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    EVICTION: tl.constexpr,
):
    """Returns [rows, SIZE]: elements FIRST .. FIRST + SIZE of each row; zero past HEAD_DIM and, MASKED, where not
    in_rows."""
    dims = FIRST + tl.arange(0, SIZE)
    tile = pointers[:, None] + (offsets[:, None] + dims[None, :])
    if MASKED:
        mask = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
        loaded = tl.load(tile, mask=mask, other=0, eviction_policy=EVICTION)
    elif FIRST + SIZE > HEAD_DIM:
        loaded = tl.load(tile, mask=(dims < HEAD_DIM)[None, :], other=0, eviction_policy=EVICTION)
    else:
        loaded = tl.load(tile, eviction_policy=EVICTION)
    return loaded


@triton.jit
def load_keys(
    pointers,
    offsets,
    in_rows,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    EVICTION: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """`load_rows` of stored keys, as DTYPE."""
    stored = load_rows(pointers, offsets, in_rows, FIRST, SIZE, HEAD_DIM, MASKED, EVICTION)
    if stored.dtype == tl.uint8:
        stored = fp8.e4m3_to_fp16(stored, NATIVE_FP8)
    return stored.to(DTYPE)


@triton.jit
def load_values(
    pointers,
    offsets,
    in_rows,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr,
    EVICTION: tl.constexpr,
    DTYPE: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """Returns stored values as DTYPE, in the two parts of `acc` and `acc_rest`."""
    if pointers.dtype.element_ty == tl.uint8:
        pairs = pointers.to(tl.pointer_type(tl.uint16), bitcast=True)
        stored = load_rows(pairs, offsets // 2, in_rows, 0, DIMS // 2, HEAD_DIM // 2, MASKED, EVICTION)
        even, odd = fp8.e4m3_pairs_to_fp16(stored, NATIVE_FP8)
        value = even.to(DTYPE)
        value_rest = odd.to(DTYPE)
    else:
        value = load_rows(pointers, offsets, in_rows, 0, DIMS, HEAD_DIM, MASKED, EVICTION).to(DTYPE)
        value_rest = value
        if REST > 0:
            value_rest = load_rows(pointers, offsets, in_rows, DIMS, REST, HEAD_DIM, MASKED, EVICTION).to(DTYPE)
    return value, value_rest


@triton.jit
def zero_parts(BLOCK_M: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr, FP8_CACHE: tl.constexpr):
    """Returns acc and acc_rest before the first key."""
    acc = tl.zeros([BLOCK_M, DIMS // 2 if FP8_CACHE else DIMS], tl.float32)
    if FP8_CACHE:
        acc_rest = acc
    elif REST > 0:
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    else:
        acc_rest = tl.zeros([BLOCK_M], tl.float32)
    return acc, acc_rest


@triton.jit
def in_order(acc, acc_rest, FP8_CACHE: tl.constexpr):
    """Returns acc [BLOCK_M, DIMS] and acc_rest [BLOCK_M, REST] from what `attend` returned."""
    if FP8_CACHE:
        acc = tl.interleave(acc, acc_rest)
    return acc, acc_rest


@triton.jit
def load_token_scales(
    scales_ptr,  # bf16, of page 0's first head
    blocks,
    start,
    block_stride,  # bytes
    in_keys,
    head,  # of keys; of values behind all of keys
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Returns fp32 [BLOCK_N]: the scales of a tile's keys or values; MASKED: 0 where not in_keys."""
    pointers = page_pointers(scales_ptr, blocks, start, block_stride, BLOCK_SIZE, 1, BLOCK_N)
    pointers += page_offsets(BLOCK_SIZE, 1, BLOCK_N) + head * BLOCK_SIZE
    if MASKED:
        return tl.load(pointers, mask=in_keys, other=0).to(tl.float32)
    return tl.load(pointers).to(tl.float32)


@triton.jit
def with_sinks(denominator, maximum, sinks_ptr, heads, in_rows):
    """The denominator of all keys with the share of each row's sink."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=in_rows, other=0.0) * LOG2E
        denominator += tl.exp2(sink - maximum)
    return denominator


@triton.jit
def load_query(
    query_ptr, offsets, in_rows, FIRST: tl.constexpr, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, FP8_CACHE: tl.constexpr,
):  # fmt: skip
    """`load_rows` of the query, in the dtype that the tile is computed in.

    That is the query's own, but fp16 for bf16 with an fp8 cache: every e4m3 number is one in fp16, where a conversion
    to bf16 would cost three instructions more for each pair; and fp16 keeps more of the query and of the weights.
    """
    pointers = tl.multiple_of(query_ptr, 16) + tl.zeros([offsets.shape[0]], tl.int32)
    query = load_rows(pointers, offsets, in_rows, FIRST, SIZE, HEAD_DIM, MASKED, "")
    return query.to(tl.float16) if FP8_CACHE and query.dtype == tl.bfloat16 else query


@triton.jit
def store_rows(pointers, in_rows, values, FIRST: tl.constexpr, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The reverse of `load_rows`, MASKED."""
    dims = FIRST + tl.arange(0, SIZE)
    mask = in_rows[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(pointers[:, None] + dims[None, :], values.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def weigh(
    scores,  # fp32 [BLOCK_M, BLOCK_N], not scaled
    maximum,  # fp32 [BLOCK_M], of the scores so far
    keys,  # int32 [BLOCK_N]
    position,  # int32 [BLOCK_M], of each row's token
    scale,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    MASKED: tl.constexpr,  # some row may not see some key of the tile
):
    """Returns fp32 [BLOCK_M, BLOCK_N] the weights of a tile's keys, the new maximum, and what sums so far are
    multiplied by."""
    factor = scale * LOG2E
    if SOFT_CAP > 0:
        # tanh(x) = 2 * sigmoid(2 * x) - 1
        scores = SOFT_CAP * (2 * tl.sigmoid(scores * (scale * (2 / SOFT_CAP))) - 1)
        factor = LOG2E
    if MASKED:
        visible = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            visible &= keys[None, :] > position[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    # The factor is positive, so it may come after the maximum: one multiply-add per score.
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1) * factor)
    weights = tl.exp2(scores * factor - new_maximum[:, None])
    return weights, new_maximum, tl.exp2(maximum - new_maximum)


@triton.jit
def attend(
    query,  # [BLOCK_M, DIMS]
    query_rest,  # [BLOCK_M, REST]
    acc,  # fp32 [BLOCK_M, DIMS], not normalised
    acc_rest,  # fp32 [BLOCK_M, REST], [BLOCK_M] and unused where REST is 0
    maximum,  # fp32 [BLOCK_M], of the scores so far
    denominator,  # fp32 [BLOCK_M]
    cache_ptr,
    scales_ptr,  # of the tokens of an int8 cache; else not used
    kv_head,
    num_kv_heads,
    head_offset,  # from the beginning of a block to the KV head's keys in it
    blocks,  # int32 [pages of a tile], from `load_blocks`
    start,
    end,  # MASKED: no key from here on is read
    position,  # int32 [BLOCK_M], of each row's token
    scale,
    block_stride,  # bytes
    value_offset,  # from the keys of a block to its values
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    EVICTION: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    MASKED: tl.constexpr,  # some row may not see some key of the tile
):
    """One step of the online softmax: the keys start .. start + BLOCK_N. Returns the new acc .. denominator."""
    keys = start + tl.arange(0, BLOCK_N)
    in_keys = keys < end
    pointers = page_pointers(cache_ptr, blocks, start, block_stride, BLOCK_SIZE, HEAD_DIM, BLOCK_N)
    offsets = page_offsets(BLOCK_SIZE, HEAD_DIM, BLOCK_N) + head_offset
    key = load_keys(pointers, offsets, in_keys, 0, DIMS, HEAD_DIM, MASKED, EVICTION, query.dtype, NATIVE_FP8)
    # Here, not where they are used: where the loop is not pipelined all are on their way together.
    if LATENT_DIM > 0:
        value = key
        value_rest = key
    else:
        value, value_rest = load_values(
            pointers, offsets + value_offset, in_keys, DIMS, REST, HEAD_DIM, MASKED, EVICTION, query.dtype, NATIVE_FP8
        )
    INT8: tl.constexpr = cache_ptr.dtype.element_ty == tl.int8
    if INT8:
        key_scales = load_token_scales(
            scales_ptr, blocks, start, block_stride, in_keys, kv_head, BLOCK_SIZE, BLOCK_N, MASKED
        )
        value_scales = load_token_scales(
            scales_ptr, blocks, start, block_stride, in_keys, num_kv_heads + kv_head, BLOCK_SIZE, BLOCK_N, MASKED
        )
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if REST > 0:
        key = load_keys(pointers, offsets, in_keys, DIMS, REST, HEAD_DIM, MASKED, EVICTION, query.dtype, NATIVE_FP8)
        scores = tl.dot(query_rest, tl.trans(key), scores, input_precision="ieee")
    if INT8:
        scores *= key_scales[None, :]
    weights, new_maximum, correction = weigh(scores, maximum, keys, position, scale, WINDOW, SOFT_CAP, MASKED)
    denominator = denominator * correction + tl.sum(weights, axis=1)
    if INT8:
        weights *= value_scales[None, :]
    weights = weights.to(query.dtype)
    acc = tl.dot(weights, value, acc * correction[:, None], input_precision="ieee")
    if len(acc_rest.shape) == 2:
        acc_rest = tl.dot(weights, value_rest, acc_rest * correction[:, None], input_precision="ieee")
    return acc, acc_rest, new_maximum, denominator

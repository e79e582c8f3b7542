"""The plan of decode attention: which program reads which keys, decided on the device once for all suitable layers.

The time of decoding is the time of reading the KV cache, so the whole GPU must read for any batch: contexts are cut
into splits. A work item is one (request, split, query tile); a program of attention does one item for one KV head, and
reads the item from the plan. Nothing is read back, the grid is fixed, and one captured graph suits every step.

The length of a split is the same for all requests, in whole tiles of keys, and each request is cut evenly into as many
as it needs. It is chosen by the time that the batch would take: programs start in waves of as many as the GPU holds
(`slots`), full waves take as long as the mean program, the last one as long as the longest; each program costs
something by itself, and so does each split when they are merged.

Example, a split of 10 tiles of 64 keys, queries of one token, one KV head:

    seq_lens   = [700, 0, 1280]
    items      = [2, 0, 2]         per request
    item 0     -> request 0, keys 320 .. 700      item 2 -> request 0, keys 0 .. 320
    item 1     -> request 2, keys 640 .. 1280     item 3 -> request 2, keys 0 .. 640
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import SHORT_QUERY
from pagewire.kernels.triton.attention.split_cut import MOST_SPLITS, Cut, cut_for
from pagewire.kernels.triton.attention.work_item import WORDS, store_item
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, settle, wait_for_inputs

# In the time of a tile: what a program costs by itself, and what it costs to merge a split.
PROGRAM_COST = tl.constexpr(0.5)
SPLIT_COST = tl.constexpr(1 / 16)
# Requests and items that are looked at together.
REQS, ITEMS = 32, 16
NUM_WARPS = 8


@triton.jit
def first_key(seq_len, query_len, PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Returns where a request's context begins: with the page of the first key that its first query token sees."""
    if WINDOW == 0:
        return seq_len * 0
    return tl.maximum(seq_len - query_len - WINDOW + 1, 0) // PAGE_TOKENS * PAGE_TOKENS


@triton.jit
def _requests(
    query_start_loc_ptr, seq_lens_ptr, first, num_reqs,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """[REQS] of the requests from `first` on: first token, query_len, seq_len, first key, query tiles, tiles of keys.

    There are no tiles of a request that is padding, or that the prefill kernel does.
    """
    request = first + tl.arange(0, REQS)
    in_batch = request < num_reqs
    seq_len = tl.load(seq_lens_ptr + request, mask=in_batch, other=0)
    start = tl.load(query_start_loc_ptr + request, mask=in_batch, other=0)
    query_len = tl.load(query_start_loc_ptr + request + 1, mask=in_batch, other=0) - start
    context_start = first_key(seq_len, query_len, PAGE_TOKENS, WINDOW)
    tiles = tl.where((seq_len > 0) & (query_len <= SHORT_QUERY), tl.cdiv(query_len, BLOCK_Q), 0)
    keys = tl.where(tiles > 0, tl.cdiv(seq_len - context_start, BLOCK_N), 0)
    return start, query_len, seq_len, context_start, tiles, keys


@triton.jit
def _split_length(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, num_items, num_kv_heads, slots, least,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """In tiles of keys, the length that costs the least time: the longest request is cut into 1 .. MOST_SPLITS."""
    longest = 0
    work = 0
    for first in range(0, num_reqs, REQS):
        _, _, _, _, tiles, keys = _requests(
            query_start_loc_ptr, seq_lens_ptr, first, num_reqs, BLOCK_Q, BLOCK_N, PAGE_TOKENS, WINDOW, REQS
        )
        longest = tl.maximum(longest, tl.max(keys))
        work += tl.sum(tiles * keys)
    splits = tl.arange(0, MOST_SPLITS) + 1
    length = tl.maximum(tl.cdiv(longest, splits), 1)
    items = tl.zeros([MOST_SPLITS], tl.int32)
    for first in range(0, num_reqs, REQS):
        _, _, _, _, tiles, keys = _requests(
            query_start_loc_ptr, seq_lens_ptr, first, num_reqs, BLOCK_Q, BLOCK_N, PAGE_TOKENS, WINDOW, REQS
        )
        items += tl.sum(tiles[:, None] * tl.cdiv(keys[:, None], length[None, :]), axis=0)
    full_waves = tl.maximum(items * num_kv_heads - 1, 0) // slots
    mean = (work + tl.zeros([MOST_SPLITS], tl.int32)).to(tl.float32) / tl.maximum(items, 1).to(tl.float32)
    cost = full_waves.to(tl.float32) * (mean + PROGRAM_COST) + length.to(tl.float32) + PROGRAM_COST
    cost += tl.where(splits > 1, splits.to(tl.float32) * SPLIT_COST, 0.0)
    possible = (splits == 1) | ((items <= num_items) & (length * BLOCK_N >= least))
    best = tl.argmin(tl.where(possible, cost, float("inf")), axis=0)
    return tl.maximum(tl.cdiv(longest, best + 1), 1)


@triton.jit
def _write(
    place_ptr, mask, request, tile, split, from_tile, to_tile, first_item, splits, tiles, start, query_len, seq_len,
    context_start, table_stride, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Items of the requests [.., 1] to place_ptr [.., n], where mask says that there are any."""
    first_token = tile * BLOCK_Q
    tokens = tl.minimum(query_len - first_token, BLOCK_Q)
    position = seq_len - query_len + first_token
    from_key = context_start + from_tile * BLOCK_N
    to_key = tl.minimum(context_start + to_tile * BLOCK_N, position + tokens)
    store_item(
        place_ptr, mask, request * table_stride, start + first_token, from_key, to_key, position, first_item + tile,
        split, splits, tokens, tiles, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _plan_by_split(
    query_start_loc_ptr, seq_lens_ptr, plan_ptr, num_reqs, table_stride, length,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """Even splits, the last of all requests first: those have the odd tiles, so that long programs start first."""
    split = tl.arange(0, MOST_SPLITS)
    counts = tl.zeros([MOST_SPLITS], tl.int32)
    for first in range(0, num_reqs, REQS):
        _, _, _, _, tiles, keys = _requests(
            query_start_loc_ptr, seq_lens_ptr, first, num_reqs, BLOCK_Q, BLOCK_N, PAGE_TOKENS, WINDOW, REQS
        )
        counts += tl.sum(tl.where(tl.cdiv(keys, length)[:, None] > split[None, :], tiles[:, None], 0), axis=0)
    total = tl.sum(counts)
    places = total - tl.cumsum(counts)
    planned = 0
    for first in range(0, num_reqs, REQS):
        start, query_len, seq_len, context_start, tiles, keys = _requests(
            query_start_loc_ptr, seq_lens_ptr, first, num_reqs, BLOCK_Q, BLOCK_N, PAGE_TOKENS, WINDOW, REQS
        )
        splits = tl.cdiv(keys, length)
        items = tiles * splits
        first_item = planned + tl.cumsum(items) - items
        short = keys // tl.maximum(splits, 1)
        num_short = splits - keys % tl.maximum(splits, 1)
        from_tile = split[None, :] * short[:, None] + tl.maximum(split[None, :] - num_short[:, None], 0)
        to_tile = from_tile + short[:, None] + (split[None, :] >= num_short[:, None]).to(tl.int32)
        here = tl.where(splits[:, None] > split[None, :], tiles[:, None], 0)
        place = places[None, :] + tl.cumsum(here, axis=0) - here
        request = (first + tl.arange(0, REQS))[:, None]
        # Query tiles of one split are neighbours: what the first reads from memory others find in the L2 cache.
        for tile in range(0, tl.max(tiles)):
            _write(
                plan_ptr + (place + tile) * WORDS, here > tile, request, tile, split[None, :], from_tile, to_tile,
                first_item[:, None], splits[:, None], tiles[:, None], start[:, None], query_len[:, None],
                seq_len[:, None], context_start[:, None], table_stride, BLOCK_Q, BLOCK_N,
            )  # fmt: skip
        places += tl.sum(here, axis=0)
        planned += tl.sum(items)
    return total


@triton.jit
def _plan_by_request(
    query_start_loc_ptr, seq_lens_ptr, plan_ptr, num_reqs, table_stride, length,
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_TOKENS: tl.constexpr, WINDOW: tl.constexpr, REQS: tl.constexpr,
    ITEMS: tl.constexpr,
):  # fmt: skip
    """Any number of splits of this length."""
    planned = 0
    for first in range(0, num_reqs, REQS):
        start, query_len, seq_len, context_start, tiles, keys = _requests(
            query_start_loc_ptr, seq_lens_ptr, first, num_reqs, BLOCK_Q, BLOCK_N, PAGE_TOKENS, WINDOW, REQS
        )
        splits = tl.cdiv(keys, length)
        items = tiles * splits
        first_item = (planned + tl.cumsum(items) - items)[:, None]
        request = (first + tl.arange(0, REQS))[:, None]
        for begin in range(0, tl.max(items), ITEMS):
            item = begin + tl.arange(0, ITEMS)[None, :]
            tile = item % tl.maximum(tiles, 1)[:, None]
            split = item // tl.maximum(tiles, 1)[:, None]
            _write(
                plan_ptr + (first_item + item) * WORDS, item < items[:, None], request, tile, split, split * length,
                split * length + length, first_item, splits[:, None], tiles[:, None], start[:, None],
                query_len[:, None], seq_len[:, None], context_start[:, None], table_stride, BLOCK_Q, BLOCK_N,
            )  # fmt: skip
        planned += tl.sum(items)
    return planned


@triton.jit(do_not_specialize=["num_reqs", "table_stride", "num_items", "num_kv_heads", "slots", "least"])
def split_plan_kernel(
    query_start_loc_ptr,  # int32 [num_reqs + 1]
    seq_lens_ptr,  # int32 [num_reqs]
    plan_ptr,  # int32 [num_items, WORDS]
    num_reqs,
    table_stride,  # of block tables, int32
    num_items,
    num_kv_heads,
    slots,
    least,
    BLOCK_Q: tl.constexpr,  # query tokens of a tile
    BLOCK_N: tl.constexpr,  # keys of a tile
    PAGE_TOKENS: tl.constexpr,  # of a page in a tile
    WINDOW: tl.constexpr,
    FIXED: tl.constexpr,  # `least` is the length of every split
    REQS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """One program."""
    wait_for_inputs()
    launch_dependents()
    if FIXED:
        total = _plan_by_request(
            query_start_loc_ptr, seq_lens_ptr, plan_ptr, num_reqs, table_stride, least // BLOCK_N,
            BLOCK_Q, BLOCK_N, PAGE_TOKENS, WINDOW, REQS, ITEMS,
        )  # fmt: skip
    else:
        length = _split_length(
            query_start_loc_ptr, seq_lens_ptr, num_reqs, num_items, num_kv_heads, slots, least,
            BLOCK_Q, BLOCK_N, PAGE_TOKENS, WINDOW, REQS,
        )  # fmt: skip
        total = _plan_by_split(
            query_start_loc_ptr, seq_lens_ptr, plan_ptr, num_reqs, table_stride, length,
            BLOCK_Q, BLOCK_N, PAGE_TOKENS, WINDOW, REQS,
        )  # fmt: skip
    for begin in range(total * WORDS, num_items * WORDS, REQS * WORDS):
        word = begin + tl.arange(0, REQS * WORDS)
        tl.store(plan_ptr + word, tl.zeros([REQS * WORDS], tl.int32), mask=word < num_items * WORDS)


def split_plan(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    cut: Cut,
    table_stride: int,
    num_kv_heads: int,
    block_n: int,
    block_size: int,
    sliding_window: int,
    is_fixed: bool,
) -> Tensor:
    """The plan, int32 [cut.num_items, WORDS], which may be read before waiting. table_stride: of the block tables."""
    plan = torch.empty((cut.num_items, WORDS.value), dtype=torch.int32, device=seq_lens.device)
    split_plan_kernel[(1,)](
        query_start_loc,
        seq_lens,
        plan,
        seq_lens.shape[0],
        table_stride,
        cut.num_items,
        num_kv_heads,
        cut.slots,
        cut.least,
        **_constants(cut.block_q, block_n, block_size, sliding_window, is_fixed),
        num_warps=NUM_WARPS,
        **dependent_launch(seq_lens.device),
    )
    settle(seq_lens.device)
    return plan


def plan_for(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    sliding_window: int,
    split_size: int,
    config: Mapping[str, int],
) -> Tensor:
    """Makes the plan of a batch. Only the shapes of query and kv_cache matter; the arguments are those of
    `decode_attention`."""
    made = cut_for(query, kv_cache, block_table, max_query_len, split_size, config)
    num_kv_heads, block_size = kv_cache.shape[2:4]
    return split_plan(
        query_start_loc, seq_lens, made, block_table.stride(0), num_kv_heads, config["block_n"], block_size,
        sliding_window, split_size > 0,
    )  # fmt: skip


@cache
def _constants(block_q: int, block_n: int, block_size: int, sliding_window: int, is_fixed: bool) -> dict[str, Any]:
    return {
        "BLOCK_Q": block_q,
        "BLOCK_N": block_n,
        "PAGE_TOKENS": min(block_size, block_n),
        "WINDOW": sliding_window,
        "FIXED": is_fixed,
        "REQS": REQS,
        "ITEMS": ITEMS,
    }


def specialization(
    block_q: int, block_n: int, block_size: int, sliding_window: int = 0, is_fixed: bool = False
) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `split_plan` compiles (kernel, argument types, constants, num_warps)."""
    names = split_plan_kernel.arg_names
    types = {name: "*i32" for name in names if name.endswith("_ptr")}
    types |= dict.fromkeys(("num_reqs", "table_stride", "num_items", "num_kv_heads", "slots", "least"), "i32")
    return split_plan_kernel, types, _constants(block_q, block_n, block_size, sliding_window, is_fixed), NUM_WARPS

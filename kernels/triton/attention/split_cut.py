"""The host's part of how decode attention cuts a batch: query tiles, and a bound on the number of splits.

The rest is decided on the device, which knows the lengths (`split_plan.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import NamedTuple

from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import SHORT_QUERY
from pagewire.kernels.triton.attention.work_item import MOST_COUNTED
from pagewire.kernels.tuning import num_multiprocessors

# Splits of a request, unless their length is fixed.
MOST_SPLITS = tl.constexpr(64)
# Waves that a batch may be cut into. Surplus programs of the grid end at once, but each has to be started.
MOST_WAVES = 6


class Cut(NamedTuple):
    """Sizes on which the plan and the attention that follows it must agree."""

    block_m: int  # rows of a query tile
    block_q: int  # query tokens of it
    num_items: int  # at most
    slots: int  # programs that the GPU holds at once
    least: int  # tokens of a split, at least; with a fixed split its length


@lru_cache(maxsize=4096)
def cut(
    block_n: int,
    slots: int,
    min_split: int,
    group: int,
    num_kv_heads: int,
    head_dim: int,
    max_tokens: int,
    num_reqs: int,
    num_tokens: int,
    max_query_len: int,
    split_size: int,
) -> Cut:
    """Cuts a batch. group: query heads of a KV head. max_tokens: of a context, as far as block tables reach."""
    short = SHORT_QUERY.value
    # Among long queries most short ones are decodes. A fixed split fixes the tile too, as rounding may depend on it.
    any_len = max_query_len > short or split_size > 0
    block_m, block_q = query_tile(head_dim, group, 0 if any_len else max_query_len)
    least = -(-(split_size or min_split) // block_n) * block_n
    tiles = min(num_reqs * -(-min(max_query_len, short) // block_q), num_tokens // block_q + num_reqs)
    splits = -(-max_tokens // least)
    if split_size > 0:
        if splits > MOST_COUNTED:
            raise ValueError(
                f"splits of {least} tokens would cut a context of {max_tokens} into {splits}, and {MOST_COUNTED} are "
                "possible: the attention split size has to be larger"
            )
        return Cut(block_m, block_q, tiles * splits, slots, least)
    items = tiles + MOST_WAVES * -(-slots // num_kv_heads)
    return Cut(block_m, block_q, min(items, tiles * min(splits, MOST_SPLITS.value)), slots, least)


@cache
def query_tile(head_dim: int, group: int, query_len: int) -> tuple[int, int]:
    """Returns (rows, tokens) of a tile that should hold query_len tokens, if as many rows fit in registers.

    0: few, and as many as there is room for.
    """
    most_rows = 64 if head_dim <= 128 else 32 if head_dim <= 256 else 16
    block_m = max(16, triton.next_power_of_2(group), min(most_rows, triton.next_power_of_2(query_len * group)))
    return block_m, 1 if query_len == 1 else min(block_m // group, SHORT_QUERY.value)


def cut_for(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    max_query_len: int,
    split_size: int,
    config: Mapping[str, int],
) -> Cut:
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    slots = config["programs_per_sm"] * num_multiprocessors(query.device)
    return cut(
        config["block_n"], slots, config["min_split"], num_heads // num_kv_heads, num_kv_heads, head_dim,
        block_table.shape[1] * block_size, block_table.shape[0], num_tokens, max_query_len, split_size,
    )  # fmt: skip

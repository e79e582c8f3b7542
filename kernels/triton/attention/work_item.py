"""One item of a split plan, as it is in memory: which keys a program of decode attention reads, for which queries.

Eight int32, so that two loads of 16 bytes bring all that is needed to ask for keys:

    entry      where the request's row of the block table begins
    token      the query tile's first token, in the batch
    start      first key
    masked     keys start .. masked are whole tiles, of which every row sees every key (unless a window ends before)
    position   of the query tile's first token, in the request
    partial    where the partials of the query tile begin, those of its first split
    splits     this split, and (<< 16) how many the request has
    counts     query tokens of the tile, (<< 8) query tiles of the request, (<< 16) keys from `masked` on

What has nothing to do is all zeros. A request's partials are side by side, those of split s of a tile at
partial + s * query tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import load_four

WORDS = tl.constexpr(8)
# Splits of a request that fit into half a word.
MOST_COUNTED = (1 << 16) - 1


@triton.jit
def store_item(
    item_ptr, mask, entry, token, start, end, position, partial, split, num_splits, num_tokens, num_tiles,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Items of any shape, where mask says that there are any. end: of the keys, which may come before `start`."""
    end = tl.maximum(end, start)
    seen = tl.minimum(end, position + 1)  # by every query token of the tile
    masked = start + tl.maximum(seen - start, 0) // BLOCK_N * BLOCK_N
    tl.store(item_ptr, entry, mask=mask)
    tl.store(item_ptr + 1, token, mask=mask)
    tl.store(item_ptr + 2, start, mask=mask)
    tl.store(item_ptr + 3, masked, mask=mask)
    tl.store(item_ptr + 4, position, mask=mask)
    tl.store(item_ptr + 5, partial, mask=mask)
    tl.store(item_ptr + 6, split | (num_splits << 16), mask=mask)
    tl.store(item_ptr + 7, num_tokens | (num_tiles << 8) | ((end - masked) << 16), mask=mask)


@triton.jit
def load_item(item_ptr):
    """Returns the scalars entry, token, start, masked, end, position, partial, split, num_splits, num_tokens,
    num_tiles."""
    entry, token, start, masked = load_four(item_ptr)
    position, partial, splits, counts = load_four(item_ptr + 4)
    num_splits = (splits >> 16) & 0xFFFF  # unsigned
    num_tokens, num_tiles, rest = counts & 0xFF, (counts >> 8) & 0xFF, counts >> 16
    return (
        entry, token, start, masked, masked + rest, position, partial, splits & 0xFFFF, num_splits, num_tokens,
        num_tiles,
    )  # fmt: skip

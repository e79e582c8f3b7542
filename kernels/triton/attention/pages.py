"""The keys of a tile: the block ids of its pages, their addresses, and prefetches of them.

A tile is a whole number of pages, or an aligned part of one page.
"""

from __future__ import annotations

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import prefetch


@triton.jit
def load_blocks(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns int32 [pages of a tile]: the block ids of the keys start .. start + BLOCK_N, 0 for pages from `end` on.

    Loops load them one tile ahead and carry them: a load of block ids inside the tile that needs them would take half
    of the compiler's pipeline stages from the loads of keys and values, which depend on it.
    """
    PAGE_TOKENS: tl.constexpr = min(BLOCK_SIZE, BLOCK_N)  # of one page in the tile
    page = tl.arange(0, BLOCK_N // PAGE_TOKENS)
    pointers = table_ptr + start // BLOCK_SIZE + page
    return tl.load(pointers, mask=start + page * PAGE_TOKENS < end, other=0, cache_modifier=".cg")


@triton.jit
def load_whole_tile_blocks(table_ptr, entry, start, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """`load_blocks` by one load, unmasked. entry: where the table's row begins; it and the rows' length are multiples
    of the pages of a tile, and `start` is one of BLOCK_N. What is behind the request's last page means nothing."""
    PAGES: tl.constexpr = max(1, BLOCK_N // BLOCK_SIZE)
    first = tl.multiple_of(entry + (start.to(tl.uint32) // BLOCK_SIZE).to(tl.int32), PAGES)
    return tl.load(table_ptr + (first + tl.arange(0, PAGES)), cache_modifier=".cg")


@triton.jit
def page_pointers(
    cache_ptr, blocks, start, block_stride, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Returns [BLOCK_N]: for the keys start .. start + BLOCK_N, where each one's page begins, or its part in a
    larger one.

    What comes to that, within a page, is added as int32 (`page_offsets`). block_stride: in bytes, so that the address
    of a page is one multiply-add.
    """
    PAGE_TOKENS: tl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    BYTES: tl.constexpr = cache_ptr.dtype.element_ty.primitive_bitwidth // 8
    bytes_ptr = cache_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    pages = bytes_ptr + blocks.to(tl.int64) * block_stride  # a pool may have more than 2^31
    if BLOCK_SIZE > BLOCK_N:
        pages += start % BLOCK_SIZE * (HEAD_DIM * BYTES)
    of_tokens = tl.reshape(tl.broadcast_to(pages[:, None], [BLOCK_N // PAGE_TOKENS, PAGE_TOKENS]), [BLOCK_N])
    # The reshape would hide that pages are aligned, and without that loads are not 16 bytes wide.
    return tl.multiple_of(of_tokens.to(cache_ptr.dtype, bitcast=True), 16)


@triton.jit
def page_offsets(BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns int32 [BLOCK_N]: where a tile's keys lie, from the beginnings that `page_pointers` gives."""
    return tl.arange(0, BLOCK_N) % min(BLOCK_SIZE, BLOCK_N) * HEAD_DIM


@triton.jit
def prefetch_split(
    cache_ptr, head_offset, value_offset, table_ptr, start, end, block_stride, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, LATENT_DIM: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Prefetches a KV head's keys start .. end and their values to the L2 cache: all of up to TILES tiles, else one.

    Short splits are of small batches. All programs of these begin early: what they read fits into that cache.
    """
    if end - start > TILES * BLOCK_N:
        _prefetch_keys(
            cache_ptr, head_offset, value_offset, table_ptr, start, start + BLOCK_N, block_stride, BLOCK_SIZE, HEAD_DIM,
            BLOCK_N, LATENT_DIM, 1,
        )  # fmt: skip
    elif start < end:
        _prefetch_keys(
            cache_ptr, head_offset, value_offset, table_ptr, start, end, block_stride, BLOCK_SIZE, HEAD_DIM, BLOCK_N,
            LATENT_DIM, TILES,
        )  # fmt: skip


@triton.jit
def _prefetch_keys(
    cache_ptr, head_offset, value_offset, table_ptr, start, end, block_stride, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, LATENT_DIM: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Prefetches up to TILES tiles, at least one. table_ptr: block ids, which are loaded together. start and end are
    multiples of a page, or of a tile in a larger page."""
    BYTES: tl.constexpr = cache_ptr.dtype.element_ty.primitive_bitwidth // 8
    PAGE_TOKENS: tl.constexpr = min(BLOCK_SIZE, BLOCK_N)
    PAGE: tl.constexpr = PAGE_TOKENS * HEAD_DIM
    LINES: tl.constexpr = (PAGE * BYTES + 127) // 128
    lines = tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)), LINES - 1) * (128 // BYTES)
    first = start + tl.arange(0, TILES * (BLOCK_N // PAGE_TOKENS)) * PAGE_TOKENS
    first = tl.minimum(first, end - PAGE_TOKENS)
    blocks = tl.load(table_ptr + first // BLOCK_SIZE, cache_modifier=".cg")
    pages = blocks.to(tl.int64) * (block_stride // BYTES)
    if BLOCK_SIZE > BLOCK_N:
        pages += first % BLOCK_SIZE * HEAD_DIM
    pointers = cache_ptr + pages[:, None] + (head_offset + lines)[None, :]
    prefetch(pointers)
    if LATENT_DIM == 0:
        prefetch(pointers + value_offset)

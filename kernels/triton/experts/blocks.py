"""The rows that a program of a product with experts' weights multiplies.

A block is up to BLOCK_M pairs of one expert, neighbours in `order`. How many blocks there are only the device knows;
`num_blocks` is a bound that follows from shapes, and programs beyond the last block end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl


def num_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks that pairs can make: an expert's pairs fill all but one of its blocks."""
    return min(num_pairs, num_experts) + num_pairs // block_m


@triton.jit
def tile_of_program(item, row_blocks, tiles_n):
    """Returns (block, tile of outputs): programs that run together share rows of x and weights, as of 8 blocks, for one
    tile of outputs after another."""
    first = item // (8 * tiles_n) * 8
    in_group = tl.minimum(row_blocks - first, 8)
    return first + item % (8 * tiles_n) % in_group, item % (8 * tiles_n) // in_group


@triton.jit
def block_of_expert(starts_ptr, block, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns (expert, the first of the block's pairs in `order`, the end of these); no pairs beyond the last block."""
    experts = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
    there = experts < NUM_EXPERTS
    starts = tl.load(starts_ptr + experts, mask=there, other=0)
    stops = tl.load(starts_ptr + experts + 1, mask=there, other=0)
    blocks = (stops - starts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, axis=0)
    is_its = (ends > block) & (ends - blocks <= block)
    first = starts + (block - ends + blocks) * BLOCK_M
    count = tl.minimum(stops - first, BLOCK_M)
    # One sum for three numbers, of one expert alone: each sum waits for all threads, and a load would wait for it.
    found = (experts.to(tl.int64) << 48) | (first.to(tl.int64) << 16) | count
    all_three = tl.sum(tl.where(is_its, found, 0))
    first = ((all_three >> 16) & 0xFFFFFFFF).to(tl.int32)
    return (all_three >> 48).to(tl.int32), first, first + (all_three & 0xFFFF).to(tl.int32)

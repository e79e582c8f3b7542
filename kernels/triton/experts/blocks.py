"""Which rows a program of a product with experts' weights multiplies.

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
def block_of_expert(starts_ptr, block, NUM_EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, the first of the block's pairs in `order`, the end of the expert's); no pairs beyond the last block."""
    experts = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
    there = experts < NUM_EXPERTS
    starts = tl.load(starts_ptr + experts, mask=there, other=0)
    stops = tl.load(starts_ptr + experts + 1, mask=there, other=0)
    blocks = (stops - starts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, axis=0)
    expert = tl.sum((ends <= block).to(tl.int32))
    is_expert = experts == expert
    before = tl.sum(tl.where(is_expert, ends - blocks, 0))
    first = tl.sum(tl.where(is_expert, starts, 0)) + (block - before) * BLOCK_M
    return expert, first, tl.sum(tl.where(is_expert, stops, 0))

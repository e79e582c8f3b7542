"""The op sort_by_expert on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs
from pagewire.kernels.triton.common.specialization import Specialization

# Pairs that a program reads at a time: of a decode step, and of longer ones. (elements, warps)
_TILES = ((256, 2), (2048, 8))


@triton.jit(do_not_specialize=["num_pairs"])
def sort_by_expert_kernel(
    ids_ptr,  # int32 [num_pairs]
    order_ptr,  # int32 [num_pairs]
    starts_ptr,  # int32 [num_experts + 1]
    num_pairs,
    TILE: tl.constexpr,
):
    """One program per expert: it counts pairs of lower experts, then lists its own. Ids are small and stay in the L2
    cache, so that all programs may read all of them, instead of several launches that sort."""
    wait_for_inputs()
    launch_dependents()
    expert = tl.program_id(0)
    pairs = tl.arange(0, TILE)
    lower = tl.zeros([TILE], dtype=tl.int32)
    for start in range(0, num_pairs, TILE):
        ids = tl.load(ids_ptr + start + pairs, mask=start + pairs < num_pairs, other=expert)
        lower += (ids < expert).to(tl.int32)
    position = tl.sum(lower)
    tl.store(starts_ptr + expert, position)
    for start in range(0, num_pairs, TILE):
        own = tl.load(ids_ptr + start + pairs, mask=start + pairs < num_pairs, other=-1) == expert
        count = own.to(tl.int32)
        tl.store(order_ptr + position + tl.cumsum(count, axis=0) - 1, start + pairs, mask=own)
        position += tl.sum(count)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, position)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Computes `reference.sort_by_expert`."""
    assert ids.dtype is torch.int32, "ids must be int32"
    assert ids.is_contiguous(), "ids must be contiguous"
    order, starts = ids.new_empty(ids.numel()), ids.new_empty(num_experts + 1)
    tile, warps = _tile(ids.numel())
    sort_by_expert_kernel[(num_experts,)](
        ids, order, starts, ids.numel(), TILE=tile, num_warps=warps, **dependent_launch(ids.device)
    )
    return order, starts


def _tile(num_pairs: int) -> tuple[int, int]:
    return _TILES[num_pairs > _TILES[0][0]]


def specialization(num_pairs: int) -> Specialization:
    """Returns what `sort_by_expert` launches, to compile it ahead of time."""
    types = {"ids_ptr": "*i32", "order_ptr": "*i32", "starts_ptr": "*i32", "num_pairs": "i32"}
    tile, warps = _tile(num_pairs)
    return Specialization(sort_by_expert_kernel, types, {"TILE": tile}, num_warps=warps, num_stages=2)

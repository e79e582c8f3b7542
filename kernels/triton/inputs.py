"""The op step_inputs on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

# Tokens or pages of one loop iteration. Eight warps, because one program walks a whole prompt chunk.
TILE = 2048
NUM_WARPS = 8


@triton.jit
def _block_ids(table_ptr, new_ids_ptr, first_new, pages, mask):
    """Block ids of a request's pages. Those appended in this step are read where they come from: the program's
    own writes to the row's table need not be visible to its other threads."""
    old = tl.load(table_ptr + pages, mask=mask & (pages < first_new), other=0)
    new = tl.load(new_ids_ptr + (pages - first_new), mask=mask & (pages >= first_new), other=0)
    return tl.where(pages < first_new, old, new)


@triton.jit
def step_inputs_kernel(
    rows_ptr,
    query_start_loc_ptr,
    num_blocks_ptr,
    new_block_start_loc_ptr,
    new_block_ids_ptr,
    token_ids_ptr,
    num_computed_tokens_ptr,
    row_block_table_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    seq_lens_ptr,
    block_table_ptr,
    token_ids_stride,
    row_group_stride,
    row_table_stride,
    slot_group_stride,
    group_stride,
    table_stride,
    num_groups,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per request, so that nothing else reads or writes its row while it moves on. A chunk of 8192
    tokens is four iterations; sharing it among programs would need a last-arriving one to advance the row."""
    wait_for_inputs()
    launch_dependents()
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    start = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - start
    tile = tl.arange(0, TILE)
    input_ids, positions, slot_mapping = input_ids_ptr + start, positions_ptr + start, slot_mapping_ptr + start
    if row < 0:
        tl.store(seq_lens_ptr + request, 0)
        for first in range(0, query_len, TILE):
            tokens = first + tile
            mask = tokens < query_len
            padding = tl.zeros([TILE], tl.int64)
            tl.store(input_ids + tokens, padding, mask=mask)
            tl.store(positions + tokens, padding, mask=mask)
            for group in range(num_groups):
                slots = slot_mapping + group * slot_group_stride
                tl.store(slots + tokens, padding - 1, mask=mask)
        return

    context_len = tl.load(num_computed_tokens_ptr + row).to(tl.int32)
    seq_len = context_len + query_len
    known = token_ids_ptr + row * token_ids_stride
    for first in range(0, query_len, TILE):
        tokens = first + tile
        mask = tokens < query_len
        span = context_len + tokens
        tl.store(input_ids + tokens, tl.load(known + span, mask=mask, other=0).to(tl.int64), mask=mask)
        tl.store(positions + tokens, span.to(tl.int64), mask=mask)

    num_pages = (seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE
    for group in range(num_groups):
        index = request * num_groups + group
        table = row_block_table_ptr + group * row_group_stride + row * row_table_stride
        first_new = tl.load(num_blocks_ptr + index)
        new_start = tl.load(new_block_start_loc_ptr + index)
        num_new = tl.load(new_block_start_loc_ptr + index + 1) - new_start
        new_ids = new_block_ids_ptr + new_start

        slots = slot_mapping + group * slot_group_stride
        for first in range(0, query_len, TILE):
            tokens = first + tile
            mask = tokens < query_len
            span = context_len + tokens
            ids = _block_ids(table, new_ids, first_new, span // BLOCK_SIZE, mask)
            tl.store(slots + tokens, ids.to(tl.int64) * BLOCK_SIZE + span % BLOCK_SIZE, mask=mask)

        batch_table = block_table_ptr + group * group_stride + request * table_stride
        for first in range(0, num_pages, TILE):
            pages = first + tile
            mask = pages < num_pages
            tl.store(batch_table + pages, _block_ids(table, new_ids, first_new, pages, mask), mask=mask)

        for first in range(0, num_new, TILE):
            new = first + tile
            mask = new < num_new
            tl.store(table + first_new + new, tl.load(new_ids + new, mask=mask), mask=mask)
    tl.store(seq_lens_ptr + request, seq_len)
    # No warp may advance the row while another has yet to read where it stood.
    tl.debug_barrier()
    tl.store(num_computed_tokens_ptr + row, seq_len.to(tl.int64))


def step_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    num_blocks: Tensor,
    new_block_start_loc: Tensor,
    new_block_ids: Tensor,
    token_ids: Tensor,
    num_computed_tokens: Tensor,
    row_block_table: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
) -> None:
    """Computes `reference.step_inputs`. The grid depends on the number of requests alone, so a CUDA graph can record
    it."""
    num_reqs, num_groups = rows.shape[0], row_block_table.shape[0]
    int32 = (rows, query_start_loc, num_blocks, new_block_start_loc, new_block_ids, seq_lens)
    int64 = (num_computed_tokens, input_ids, positions, slot_mapping)
    tables = (token_ids, row_block_table, block_table)
    assert all(tensor.dtype == torch.int32 for tensor in (*int32, *tables)), "rows, counts and tables are int32"
    assert all(tensor.dtype == torch.int64 for tensor in int64), "ids, positions, slots and progress are int64"
    assert all(tensor.stride(-1) == 1 for tensor in (*int32, *int64, *tables)), "the last dimension is contiguous"
    assert query_start_loc.shape[0] == num_reqs + 1, "query_start_loc is [num_reqs + 1]"
    assert new_block_start_loc.shape[0] == num_reqs * num_groups + 1, "new_block_start_loc is [num_reqs * groups + 1]"
    assert num_blocks.shape == (num_reqs, num_groups) and seq_lens.shape[0] == num_reqs, "one entry per request"
    assert num_blocks.is_contiguous(), "a request's groups are side by side, and requests behind each other"
    assert block_table.shape[:2] == (num_groups, num_reqs) and slot_mapping.shape[0] == num_groups, "one per group"
    if num_reqs == 0:
        return
    step_inputs_kernel[(num_reqs,)](
        rows,
        query_start_loc,
        num_blocks,
        new_block_start_loc,
        new_block_ids,
        token_ids,
        num_computed_tokens,
        row_block_table,
        input_ids,
        positions,
        slot_mapping,
        seq_lens,
        block_table,
        token_ids.stride(0),
        row_block_table.stride(0),
        row_block_table.stride(1),
        slot_mapping.stride(0),
        block_table.stride(0),
        block_table.stride(1),
        num_groups,
        BLOCK_SIZE=block_size,
        TILE=TILE,
        num_warps=NUM_WARPS,
        **dependent_launch(rows.device),
    )


def specialization(block_size: int) -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns what `step_inputs` launches (kernel, argument types, constants, num_warps), to compile it
    ahead of time."""
    names = step_inputs_kernel.arg_names
    int64 = ("num_computed_tokens_ptr", "input_ids_ptr", "positions_ptr", "slot_mapping_ptr")
    types = {name: "*i64" if name in int64 else "*i32" for name in names if name.endswith("_ptr")}
    types |= {name: "i32" for name in names if name.endswith("_stride") or name == "num_groups"}
    return step_inputs_kernel, types, {"BLOCK_SIZE": block_size, "TILE": TILE}, NUM_WARPS

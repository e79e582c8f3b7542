"""The op step_inputs in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import I, L, P, bind, check_dtype

__all__ = ["step_inputs"]

_step_inputs = bind("step_inputs", *[P] * 6, L, P, P, L, L, P, P, P, L, P, P, L, L, L, I, I)


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
    ids_and_lengths = (rows, query_start_loc, num_blocks, new_block_start_loc, new_block_ids, seq_lens)
    tables = (token_ids, row_block_table, block_table)
    check_dtype("step_inputs", torch.int32, *ids_and_lengths, *tables)
    check_dtype("step_inputs", torch.int64, num_computed_tokens, input_ids, positions, slot_mapping)
    _step_inputs(
        rows.data_ptr(),
        query_start_loc.data_ptr(),
        num_blocks.data_ptr(),
        new_block_start_loc.data_ptr(),
        new_block_ids.data_ptr(),
        token_ids.data_ptr(),
        token_ids.stride(0),
        num_computed_tokens.data_ptr(),
        row_block_table.data_ptr(),
        row_block_table.stride(0),
        row_block_table.stride(1),
        input_ids.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        slot_mapping.stride(0),
        seq_lens.data_ptr(),
        block_table.data_ptr(),
        block_table.stride(0),
        block_table.stride(1),
        block_size,
        rows.shape[0],
        len(row_block_table),
    )

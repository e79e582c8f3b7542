"""The inputs of a forward pass, made on the device from the rows of its requests."""

from __future__ import annotations

from torch import Tensor

from pagewire.kernels.ops.definition import op


@op(
    mutates=(
        "num_computed_tokens",
        "row_block_table",
        "input_ids",
        "positions",
        "slot_mapping",
        "seq_lens",
        "block_table",
    ),
)
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
    """Gathers the inputs of a forward pass from the rows of its requests, and advances the rows.

    Every group of layers that share a KV cache has separate block tables; there may be no groups.

    Read:
    rows                 int32 [num_reqs], batch_idx -> row, distinct; -1 = padding
    query_start_loc      int32 [num_reqs + 1]; a padding request has tokens too
    num_blocks           int32 [num_reqs, groups], how far the row's tables reach before this step's are appended
    new_block_start_loc  int32 [num_reqs * groups + 1]: request b's table of group g gets
                         new_block_ids[start[i] : start[i + 1]], i = b * groups + g
    new_block_ids        int32 [>= new_block_start_loc[-1]]
    token_ids            int32 [max_num_seqs, max_model_len]
    Changed:
    num_computed_tokens  int64 [max_num_seqs], += the query's length
    row_block_table      int32 [groups, max_num_seqs, max_blocks], new blocks appended
    Written:
    input_ids, positions int64 [num_tokens]; padding: 0
    slot_mapping         int64 [groups, num_tokens]; padding: -1
    seq_lens             int32 [num_reqs]; padding: 0
    block_table          int32 [groups, num_reqs, max_blocks], the row's tables as far as seq_len reaches, the rest
                         untouched
    """

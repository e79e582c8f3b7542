"""What a step tells every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepContext:
    """One step's ragged batch. Request b's query tokens are `query_start_loc[b] : query_start_loc[b + 1]`.

    Example, block_size 4: row 7 decodes its 6th token, row 3 prefills 3 tokens of an empty context:

        positions       = [5, 0, 1, 2]                      rows            = [7, 3]
        query_start_loc = [0, 1, 4]    seq_lens = [6, 3]    block_table     = [[7, 2], [5, -]]
        slot_mapping    = [9, 20, 21, 22]                   max_query_len   = 3

    Whatever else a layer may want to know of a token (later its adapter) is a column that `rows` index.
    """

    positions: Tensor  # int64 [num_tokens], within the request
    rows: Tensor  # int32 [num_reqs], idx_mapping: batch index -> row; -1 = padding
    query_start_loc: Tensor  # int32 [num_reqs + 1]
    seq_lens: Tensor  # int32 [num_reqs], context_len + query_len; 0 = padding
    block_table: Tensor  # int32 [num_reqs, max_blocks], batch_idx -> ordered block ids
    slot_mapping: Tensor  # int64 [num_tokens], -1 = padding
    max_query_len: int
    split_size: int = 0  # tokens of context per attention program; 0 = chosen on the device from all lengths

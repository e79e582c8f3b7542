"""The inputs of a forward pass (`pagewire.kernels.ops.inputs`)."""

from __future__ import annotations

import torch
from torch import Tensor


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
    starts, new_starts = query_start_loc.tolist(), new_block_start_loc.tolist()
    groups = len(row_block_table)
    for b, row in enumerate(rows.tolist()):
        tokens = slice(starts[b], starts[b + 1])
        if row < 0:
            input_ids[tokens], positions[tokens], slot_mapping[:, tokens], seq_lens[b] = 0, 0, -1, 0
            continue
        context_len = int(num_computed_tokens[row])
        seq_len = context_len + tokens.stop - tokens.start
        span = torch.arange(context_len, seq_len, device=rows.device)
        input_ids[tokens] = token_ids[row, span].long()
        positions[tokens] = span
        seq_lens[b] = seq_len
        num_computed_tokens[row] = seq_len
        num_pages = -(-seq_len // block_size)
        for g in range(groups):
            table = row_block_table[g, row]
            new_ids = new_block_ids[new_starts[b * groups + g] : new_starts[b * groups + g + 1]]
            first_new = int(num_blocks[b, g])
            table[first_new : first_new + len(new_ids)] = new_ids
            slot_mapping[g, tokens] = table[span // block_size].long() * block_size + span % block_size
            block_table[g, b, :num_pages] = table[:num_pages]

"""The model's inputs for one step, gathered from the rows of the requests that run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.executor.attention import AttentionMetadata
from services.executor.block_table import BlockTable, ragged_arange
from services.executor.request_state import RequestState
from services.executor.step import ProtocolError, Step
from services.executor.upload import upload


@dataclass(frozen=True)
class InputBatch:
    """Example: row 4 decodes at position 9, row 0 prefills 3 of its 8 prompt tokens, from the start:

    rows = [4, 0]    input_ids = token_ids[[4, 0, 0, 0], [9, 0, 1, 2]]    positions = [9, 0, 1, 2]
    sampled_rows = [4]    attn.logits_indices = [0]    sampled_positions = [10]
    """

    rows: np.ndarray  # int64 [num_reqs], idx_mapping: batch index -> row
    sampled: np.ndarray  # int64 [S], indices into rows: those that reach their last known token
    sampled_rows: np.ndarray  # int64 [S]
    num_tokens: int
    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    attn: AttentionMetadata
    # Where the sampled tokens go.
    sampled_rows_tensor: Tensor  # int64 [S]
    sampled_positions: Tensor  # int64 [S]


def prepare_inputs(
    step: Step,
    rows: np.ndarray,
    state: RequestState,
    block_table: BlockTable,
    block_size: int,
    max_num_batched_tokens: int,
    device: torch.device,
) -> InputBatch:
    """Index arithmetic on the host, one upload, then the gathers on the device. Raises ProtocolError."""
    query_lens = step.num_scheduled_tokens
    context_lens = state.num_computed_tokens[rows]
    seq_lens = context_lens + query_lens
    known = state.num_tokens[rows]
    _check(step, rows, query_lens, seq_lens, known, block_table.num_blocks[rows] * block_size)
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)  # [num_reqs + 1]
    np.cumsum(query_lens, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    if num_tokens > max_num_batched_tokens:
        raise ProtocolError(
            f"step {step.step_id} has {num_tokens} tokens; max_num_batched_tokens is {max_num_batched_tokens}"
        )
    token_rows = np.repeat(rows, query_lens)  # [num_tokens]
    positions = np.repeat(context_lens, query_lens) + ragged_arange(query_lens)
    blocks = block_table.host[token_rows, positions // block_size]
    sampled = np.flatnonzero(seq_lens == known)
    if len(sampled) and known[sampled].max() >= state.max_model_len:
        raise ProtocolError(f"a request grows beyond max_model_len {state.max_model_len}")
    tensors = upload(
        device,
        {
            "rows": rows,
            "query_start_loc": query_start_loc,
            "seq_lens": seq_lens.astype(np.int32),
            "token_rows": token_rows,
            "positions": positions,
            "slot_mapping": blocks.astype(np.int64) * block_size + positions % block_size,
            "logits_indices": query_start_loc[1:][sampled].astype(np.int64) - 1,
            "sampled_rows": rows[sampled],
            "sampled_positions": known[sampled],
        },
    )
    max_blocks = -(-int(seq_lens.max()) // block_size)
    attn = AttentionMetadata(
        query_start_loc=tensors["query_start_loc"],
        seq_lens=tensors["seq_lens"],
        block_table=block_table.tensor[:, :max_blocks].index_select(0, tensors["rows"]),
        slot_mapping=tensors["slot_mapping"],
        max_query_len=int(query_lens.max()),
        logits_indices=tensors["logits_indices"],
    )
    return InputBatch(
        rows=rows,
        sampled=sampled,
        sampled_rows=rows[sampled],
        num_tokens=num_tokens,
        input_ids=state.token_ids[tensors["token_rows"], tensors["positions"]].long(),
        positions=tensors["positions"],
        attn=attn,
        sampled_rows_tensor=tensors["sampled_rows"],
        sampled_positions=tensors["sampled_positions"],
    )


def _check(
    step: Step,
    rows: np.ndarray,
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    known: np.ndarray,
    num_slots: np.ndarray,
) -> None:
    if len(query_lens) != len(rows):
        raise ProtocolError(f"{len(rows)} requests, but {len(query_lens)} num_scheduled_tokens")
    wrong = (query_lens < 1) | (seq_lens > known) | (seq_lens > num_slots)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise ProtocolError(
            f"request {step.request_ids[index]}: {query_lens[index]} tokens up to {seq_lens[index]} are scheduled, "
            f"it has {known[index]} tokens and blocks for {num_slots[index]}"
        )

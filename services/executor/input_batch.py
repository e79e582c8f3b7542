"""The model's inputs for one step: the host says who runs, the device gathers the rest from their rows.

They are always in the same memory, which may be overwritten as soon as a step is launched: the device works in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.block_table import BlockTable
from pagewire.services.executor.request_state import RequestState
from pagewire.services.executor.step import ProtocolError, Step
from pagewire.services.executor.step_context import StepContext
from pagewire.services.executor.upload import upload_into

PADDING_ROW = -1


@dataclass(frozen=True)
class BatchShape:
    """The sizes that a step is launched with, padding included."""

    num_reqs: int
    num_tokens: int
    num_sampled: int
    max_query_len: int

    @classmethod
    def decode(cls, num_reqs: int) -> BatchShape:
        return cls(num_reqs, num_reqs, num_reqs, 1)

    @property
    def is_decode(self) -> bool:
        """One token for each request, and each gets its next."""
        return self.num_tokens == self.num_reqs == self.num_sampled


@dataclass(frozen=True)
class InputBatch:
    """One step as the host sees it.

    Example: row 4 decodes at position 9, row 0 prefills 3 of its 8 prompt tokens, from the start:

    rows = [4, 0]    query_lens = [1, 3]    sampled = [0]    sampled_rows = [4]
    On the device `step_inputs` makes of it: input_ids = token_ids[[4, 0, 0, 0], [9, 0, 1, 2]], positions = [9, 0, 1, 2]
    """

    rows: np.ndarray  # int64 [num_reqs], idx_mapping: batch index -> row
    query_lens: np.ndarray  # int64 [num_reqs]
    num_tokens: int
    sampled: np.ndarray  # int64 [S], indices into rows: those that reach their last known token
    sampled_rows: np.ndarray  # int64 [S]

    @property
    def shape(self) -> BatchShape:
        return BatchShape(len(self.rows), self.num_tokens, len(self.sampled), int(self.query_lens.max()))


def make_batch(step: Step, rows: np.ndarray, state: RequestState, num_slots: np.ndarray, max_tokens: int) -> InputBatch:
    """num_slots [num_reqs]: how many tokens the blocks of each request hold. Raises ProtocolError."""
    query_lens = step.num_scheduled_tokens
    if len(query_lens) != len(rows):
        raise ProtocolError(f"{len(rows)} requests, but {len(query_lens)} num_scheduled_tokens")
    seq_lens, known = state.num_computed_tokens[rows] + query_lens, state.num_tokens[rows]
    wrong = (query_lens < 1) | (seq_lens > known) | (seq_lens > num_slots)
    if wrong.any():
        index = int(np.flatnonzero(wrong)[0])
        raise ProtocolError(
            f"request {step.request_ids[index]}: {query_lens[index]} tokens up to {seq_lens[index]} are scheduled, "
            f"it has {known[index]} tokens and blocks for {num_slots[index]}"
        )
    num_tokens = int(query_lens.sum())
    if num_tokens > max_tokens:
        raise ProtocolError(f"step {step.step_id} has {num_tokens} tokens; max_num_batched_tokens is {max_tokens}")
    sampled = np.flatnonzero(seq_lens == known)
    if len(sampled) and known[sampled].max() >= state.max_model_len:
        raise ProtocolError(f"a request grows beyond max_model_len {state.max_model_len}")
    return InputBatch(rows, query_lens, num_tokens, sampled, rows[sampled])


class InputBuffers:
    """The device memory of a step's inputs."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        block_table: BlockTable,
        num_pool_blocks: int,
        device: torch.device,
    ) -> None:
        # All that the host tells is staged as one array and copied at once.
        max_num_reqs = max_num_seqs + 1  # where tokens are padded there is a request that they belong to
        sections = {
            "rows": max_num_reqs,
            "query_start_loc": max_num_reqs + 1,
            "num_blocks": max_num_reqs,
            "new_block_start_loc": max_num_reqs + 1,
            "logits_indices": max_num_seqs,
            "sampled_rows": max_num_seqs,
            "new_block_ids": num_pool_blocks,  # last: only as much as there is of it is copied
        }
        size = sum(sections.values())
        self._staged = torch.zeros(size, dtype=torch.int32, device=device)
        self._is_shared = device.type == "cpu"  # a step has been computed when the next is staged
        self._host = self._staged.numpy() if self._is_shared else np.zeros(size, dtype=np.int32)
        ends = np.cumsum(list(sections.values()))
        self._host_sections = dict(zip(sections, np.split(self._host, ends[:-1]), strict=True))
        device_sections = dict(zip(sections, self._staged.split(list(sections.values())), strict=True))
        self._rows = device_sections["rows"]
        self._query_start_loc = device_sections["query_start_loc"]
        self._num_blocks = device_sections["num_blocks"]
        self._new_block_start_loc = device_sections["new_block_start_loc"]
        self._logits_indices = device_sections["logits_indices"]
        self._sampled_rows = device_sections["sampled_rows"]
        self._new_block_ids = device_sections["new_block_ids"]

        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._slot_mapping = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(max_num_reqs, block_table.tensor.shape[1], dtype=torch.int32, device=device)

    def stage(self, batch: InputBatch, step: Step, block_table: BlockTable, shape: BatchShape) -> None:
        """Brings what the host knows to the device, in one copy (on a CPU in none).

        The step's blocks must be counted in block_table already. shape: what the step is launched with; requests
        beyond the batch have no row. The tokens beyond it are theirs, of which there must be one then.
        """
        num_reqs, num_sampled, num_tokens = len(batch.rows), len(batch.sampled), batch.num_tokens
        host = self._host_sections
        host["rows"][:num_reqs] = batch.rows
        query_start_loc = host["query_start_loc"][: shape.num_reqs + 1]
        np.cumsum(batch.query_lens, out=query_start_loc[1 : num_reqs + 1])
        host["num_blocks"][:num_reqs] = block_table.num_blocks[batch.rows] - step.num_new_blocks
        np.cumsum(step.num_new_blocks, out=host["new_block_start_loc"][1 : num_reqs + 1])
        host["new_block_ids"][: len(step.new_block_ids)] = step.new_block_ids
        host["logits_indices"][:num_sampled] = query_start_loc[1 : num_reqs + 1][batch.sampled] - 1
        host["sampled_rows"][:num_sampled] = batch.sampled_rows
        if num_padding := shape.num_reqs - num_reqs:
            host["rows"][num_reqs : shape.num_reqs] = PADDING_ROW
            # One token each, the rest for the last.
            starts = np.arange(num_tokens + 1, num_tokens + 1 + num_padding)
            query_start_loc[num_reqs + 1 :] = np.minimum(starts, shape.num_tokens)
            query_start_loc[-1] = shape.num_tokens
            host["new_block_start_loc"][num_reqs + 1 : shape.num_reqs + 1] = len(step.new_block_ids)
        host["sampled_rows"][num_sampled : shape.num_sampled] = PADDING_ROW
        if not self._is_shared:
            used = len(self._host) - len(host["new_block_ids"]) + len(step.new_block_ids)
            upload_into(self._staged[:used], self._host[:used])

    def gather(
        self, shape: BatchShape, state: RequestState, block_table: BlockTable, block_size: int, split_size: int
    ) -> tuple[Tensor, StepContext]:
        """(input_ids, context) of the staged step; rows and block tables move on."""
        num_reqs, num_tokens = shape.num_reqs, shape.num_tokens
        rows = self._rows[:num_reqs]
        query_start_loc = self._query_start_loc[: num_reqs + 1]
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
        slot_mapping, seq_lens = self._slot_mapping[:num_tokens], self._seq_lens[:num_reqs]
        batch_table = self._block_table[:num_reqs]
        ops.step_inputs(
            rows,
            query_start_loc,
            self._num_blocks[:num_reqs],
            self._new_block_start_loc[: num_reqs + 1],
            self._new_block_ids,
            state.token_ids,
            state.columns.num_computed_tokens,
            block_table.tensor,
            input_ids,
            positions,
            slot_mapping,
            seq_lens,
            batch_table,
            block_size,
        )
        context = StepContext(
            positions, rows, query_start_loc, seq_lens, batch_table, slot_mapping, shape.max_query_len, split_size
        )
        return input_ids, context

    def select_sampled(self, shape: BatchShape, hidden: Tensor) -> Tensor:
        """The hidden states [num_sampled, hidden_size] that tokens are sampled from."""
        if shape.num_sampled == shape.num_tokens:
            return hidden
        return hidden.index_select(0, self._logits_indices[: shape.num_sampled])

    def sampled_rows(self, num_sampled: int) -> Tensor:
        """int32 [num_sampled]: sampled position -> row."""
        return self._sampled_rows[:num_sampled]

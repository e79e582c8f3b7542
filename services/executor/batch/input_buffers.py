"""The memory of a step's inputs on the device.

It is the same memory for every step, and may be overwritten once a step is launched: the device works in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import BatchShape, InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.upload import upload_into
from pagewire.services.executor.sampling.row_columns import RowColumns
from pagewire.services.executor.step.step import Step
from pagewire.services.executor.step.step_context import StepContext, StepImages, Stream

PADDING_ROW = -1


class Rows(Protocol):
    """The source of a gather: a `RequestState`, or its rows with other counts."""

    token_ids: Tensor  # int32 [max_num_seqs, max_model_len]
    columns: RowColumns


class InputBuffers:
    """The device memory of a step's inputs."""

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        block_tables: BlockTables,
        device: torch.device,
        max_draft_tokens: int = 0,
        max_rounds: int = 0,
    ) -> None:
        """max_rounds: see `stage_rounds`."""
        # All inputs from the host are staged as one array and copied at once.
        max_num_reqs = max_num_seqs + 1  # padding tokens belong to an extra request
        max_samples = max_num_seqs * (1 + max_draft_tokens)
        num_groups = block_tables.num_groups
        sections = {
            "rows": max_num_reqs,
            "query_start_loc": max_num_reqs + 1,
            "num_blocks": max_num_reqs * num_groups,
            "new_block_start_loc": max_num_reqs * num_groups + 1,
            "logits_indices": max_samples,
            "sample_rows": max_samples,
            "offsets": max_samples if max_draft_tokens else 0,
            "sample_start_loc": max_num_reqs + 1 if max_draft_tokens else 0,
            "adapter_slots": max_num_reqs,
            "rounds": max_num_reqs * max_rounds,
            "new_block_ids": block_tables.num_pool_blocks,  # last: only its used part is copied
        }
        size = sum(sections.values())
        self._staged = torch.zeros(size, dtype=torch.int32, device=device)
        self._is_shared = memory.is_shared(device)  # a step is computed before the next is staged
        self._host = self._staged.numpy() if self._is_shared else np.zeros(size, dtype=np.int32)
        ends = np.cumsum(list(sections.values()))
        self._host_sections = dict(zip(sections, np.split(self._host, ends[:-1]), strict=True))
        device_sections = dict(zip(sections, self._staged.split(list(sections.values())), strict=True))
        self._rows = device_sections["rows"]
        self._query_start_loc = device_sections["query_start_loc"]
        self._num_blocks = device_sections["num_blocks"]
        self._new_block_start_loc = device_sections["new_block_start_loc"]
        self._logits_indices = device_sections["logits_indices"]
        self._sample_rows = device_sections["sample_rows"]
        self._offsets = device_sections["offsets"]
        self._sample_start_loc = device_sections["sample_start_loc"]
        self._adapter_slots = device_sections["adapter_slots"]
        self._new_block_ids = device_sections["new_block_ids"]
        self._rounds = device_sections["rounds"].view(max_rounds, max_num_reqs)

        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._slot_mapping = torch.zeros(num_groups, max_num_tokens, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)
        max_blocks = block_tables.tensor.shape[2]
        self._block_table = torch.zeros(num_groups, max_num_reqs, max_blocks, dtype=torch.int32, device=device)
        self._num_gained = torch.zeros(max_num_reqs if max_draft_tokens else 0, dtype=torch.int64, device=device)

    def stage(self, batch: InputBatch, step: Step, block_tables: BlockTables, shape: BatchShape) -> None:
        """Sends the host's inputs to the device in one copy (without a copy on a CPU).

        The step's blocks must be counted in block_tables already. shape: what the step is launched with; requests
        beyond the batch have no row. If it has tokens beyond the batch, it needs such a request to hold them.
        """
        num_reqs, num_sampled, num_tokens = len(batch.rows), len(batch.sample_rows), batch.num_tokens
        num_groups = block_tables.num_groups
        num_tables = num_reqs * num_groups
        host = self._host_sections
        host["rows"][:num_reqs] = batch.rows
        query_start_loc = host["query_start_loc"][: shape.num_reqs + 1]
        np.cumsum(batch.query_lens, out=query_start_loc[1 : num_reqs + 1])
        host["num_blocks"][:num_tables] = (block_tables.num_blocks[batch.rows] - step.num_new_blocks).ravel()
        np.cumsum(step.num_new_blocks, out=host["new_block_start_loc"][1 : num_tables + 1])
        host["new_block_ids"][: len(step.new_block_ids)] = step.new_block_ids
        host["sample_rows"][:num_sampled] = batch.sample_rows
        if shape.has_adapters:
            host["adapter_slots"][: shape.num_reqs] = -1
            host["adapter_slots"][:num_reqs] += 0 if batch.adapter_slots is None else batch.adapter_slots
        if batch.num_samples is None or batch.offsets is None:
            host["logits_indices"][:num_sampled] = query_start_loc[1 : num_reqs + 1][batch.sampled] - 1
        else:
            self._stage_samples(batch, batch.num_samples, batch.offsets, shape)
        if num_padding := shape.num_reqs - num_reqs:
            host["rows"][num_reqs : shape.num_reqs] = PADDING_ROW
            # One token each, the rest for the last; in a uniform step as many as the others.
            query_len = shape.max_query_len if shape.is_uniform else 1
            starts = np.arange(1, num_padding + 1) * query_len + num_tokens
            query_start_loc[num_reqs + 1 :] = np.minimum(starts, shape.num_tokens)
            query_start_loc[-1] = shape.num_tokens
            host["new_block_start_loc"][num_tables + 1 : shape.num_reqs * num_groups + 1] = len(step.new_block_ids)
        host["sample_rows"][num_sampled : shape.num_sampled] = PADDING_ROW
        host["logits_indices"][num_sampled : shape.num_sampled] = 0  # indices of an earlier step may be out of range
        if not self._is_shared:
            used = len(self._host) - len(host["new_block_ids"]) + len(step.new_block_ids)
            upload_into(self._staged[:used], self._host[:used])

    def stage_rounds(
        self, batch: InputBatch, sizes: Sequence[int], step: Step, block_tables: BlockTables, shape: BatchShape
    ) -> None:
        """Stages several steps of one token each: step i has the batch's first sizes[i] requests. sizes: descending
        from the batch's size. shape: the first step's. The other steps then need nothing from the host."""
        rounds = self._host_sections["rounds"].reshape(self._rounds.shape)
        rounds[: len(sizes)] = PADDING_ROW
        for staged, size in zip(rounds, sizes, strict=False):
            staged[:size] = batch.rows[:size]
        self.stage(batch, step, block_tables, shape)

    def begin_round(self, index: int, num_reqs: int) -> None:
        """Makes this staged round the next step, padded to num_reqs. New blocks are written again, to the same
        places."""
        rows = self._rounds[index, :num_reqs]
        self._rows[:num_reqs].copy_(rows)
        self._sample_rows[:num_reqs].copy_(rows)

    def _stage_samples(
        self, batch: InputBatch, num_samples: np.ndarray, offsets: np.ndarray, shape: BatchShape
    ) -> None:
        """Stages the sampled positions of a step with drafts: the last num_samples tokens of each sampled request."""
        host = self._host_sections
        first = host["query_start_loc"][1 : len(batch.rows) + 1][batch.sampled] - num_samples
        host["logits_indices"][: len(offsets)] = np.repeat(first, num_samples) + offsets
        host["offsets"][: len(offsets)] = offsets
        counts = np.zeros(shape.num_reqs, dtype=np.int64)
        counts[batch.sampled] = num_samples
        if shape.is_uniform:
            counts[len(batch.rows) :] = shape.max_query_len
        np.cumsum(counts, out=host["sample_start_loc"][1 : shape.num_reqs + 1])

    def gather(
        self,
        shape: BatchShape,
        state: Rows,
        block_tables: BlockTables,
        block_size: int,
        split_size: int,
        images: StepImages | None = None,
        stream: Stream | None = None,
    ) -> tuple[Tensor, StepContext]:
        """Returns (input_ids, context) of the staged step, and advances rows and block tables."""
        num_reqs, num_tokens, num_groups = shape.num_reqs, shape.num_tokens, block_tables.num_groups
        rows = self._rows[:num_reqs]
        query_start_loc = self._query_start_loc[: num_reqs + 1]
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
        slot_mapping, seq_lens = self._slot_mapping[:, :num_tokens], self._seq_lens[:num_reqs]
        batch_table = self._block_table[:, :num_reqs]
        ops.step_inputs(
            rows,
            query_start_loc,
            self._num_blocks[: num_reqs * num_groups].view(num_reqs, num_groups),
            self._new_block_start_loc[: num_reqs * num_groups + 1],
            self._new_block_ids,
            state.token_ids,
            state.columns.num_computed_tokens,
            block_tables.tensor,
            input_ids,
            positions,
            slot_mapping,
            seq_lens,
            batch_table,
            block_size,
        )
        context = StepContext(
            positions,
            rows,
            query_start_loc,
            seq_lens,
            batch_table.unbind(),
            slot_mapping.unbind(),
            shape.max_query_len,
            shape.min_query_len,
            split_size,
            images=images,
            stream=stream,
            position_deltas=state.columns.position_delta,
            adapter_slots=self._token_slots(query_start_loc, shape) if shape.has_adapters else None,
            second_text_start=state.columns.second_text_start,
        )
        return input_ids, context

    def _token_slots(self, query_start_loc: Tensor, shape: BatchShape) -> Tensor:
        """Returns token -> slot of its request's adapter, int32 [num_tokens]; -1 = none."""
        slots = self._adapter_slots[: shape.num_reqs]
        if shape.max_query_len == 1 and shape.num_tokens == shape.num_reqs:
            return slots
        tokens = torch.arange(shape.num_tokens, dtype=torch.int32, device=slots.device)
        return slots.index_select(0, torch.bucketize(tokens, query_start_loc[1:], right=True))

    def select_sampled(self, shape: BatchShape, hidden: Tensor) -> Tensor:
        """The hidden states [num_sampled, hidden_size] that tokens are sampled from."""
        if shape.num_sampled == shape.num_tokens:
            return hidden
        return hidden.index_select(0, self._logits_indices[: shape.num_sampled])

    def sample_rows(self, num_sampled: int) -> Tensor:
        """Returns sampled position -> row, int32 [num_sampled]."""
        return self._sample_rows[:num_sampled]

    def offsets(self, num_sampled: int) -> Tensor:
        """Returns the number of drafts before each sampled position, int32 [num_sampled], in a step with drafts."""
        return self._offsets[:num_sampled]

    def accept(self, sampled: Tensor, shape: BatchShape, state: RequestState) -> None:
        """Appends the gains of a step with drafts. sampled: tokens int64 [num_sampled]; see `num_gained`."""
        ops.accept_tokens(
            sampled,
            self._rows[: shape.num_reqs],
            self._sample_start_loc[: shape.num_reqs + 1],
            state.token_ids,
            state.columns.num_tokens,
            state.columns.num_computed_tokens,
            self._num_gained[: shape.num_reqs],
        )

    def num_gained(self, num_reqs: int) -> Tensor:
        """Returns the number of tokens that each request gained in the last step with drafts, int64 [num_reqs]. The
        next such step overwrites it."""
        return self._num_gained[:num_reqs]

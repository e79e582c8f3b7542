"""Steps of a model that drafts: over the rows of the one it drafts for, with counts of tokens of their own.

A round is a plain step: tokens are drawn with the seeds of the rows, at the positions where the other model will draw
its own, so with the same noise: where both find the same distribution they draw the same token, greedily or not. Each
token goes behind the row's known ones, where it is the input of the next round, and a draft in the step that follows.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.block_table import BlockTables
from pagewire.services.executor.cuda_graphs import CudaGraphs, Steps
from pagewire.services.executor.dummy_step import NO_STEP
from pagewire.services.executor.input_batch import BatchShape, InputBatch
from pagewire.services.executor.input_buffers import InputBuffers
from pagewire.services.executor.limits import Limits
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.request_state import RequestState
from pagewire.services.executor.sampler import sample_tokens
from pagewire.services.executor.step import Step

_NONE = np.empty(0, dtype=np.int64)


class _Rows:
    """The rows of a state, but for how many tokens they have."""

    def __init__(self, state: RequestState) -> None:
        self.token_ids = state.token_ids
        self.columns = copy.copy(state.columns)
        self.columns.num_tokens = torch.zeros_like(state.columns.num_tokens)
        self.columns.num_computed_tokens = torch.zeros_like(state.columns.num_computed_tokens)


class DraftSteps:
    """One model's. Nothing here waits for the device."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        state: RequestState,
        block_tables: BlockTables,
        device: torch.device,
        split_size: int = 0,
        graphs: Steps | None = None,
    ) -> None:
        """state, block_tables: of the model that is drafted for. split_size, graphs: as of `ModelRunner`."""
        self._model = model
        self._block_size = limits.block_size
        self._state, self._block_tables = state, block_tables
        self._rows = _Rows(state)
        self._split_size = split_size
        self._inputs = InputBuffers(limits.max_num_seqs, limits.max_num_batched_tokens, block_tables, device)
        self._graphs: Steps = graphs or CudaGraphs()

    def start(self, num_missing: Tensor | int = 1) -> None:
        """Takes over how many tokens the rows have. num_missing int64 [max_num_seqs]: how many of them are computed in
        the next round, the last ones."""
        counts, mine = self._state.columns, self._rows.columns
        mine.num_tokens.copy_(counts.num_tokens)
        torch.sub(counts.num_tokens, num_missing, out=mine.num_computed_tokens)

    def run(self, step: Step, rows: np.ndarray, query_lens: np.ndarray, sampled: np.ndarray) -> None:
        """A round. rows, query_lens int64 [n]; sampled int64 [m], indices into rows: those that get a token.

        step: has the new blocks of these rows, which are counted in the block tables already.
        """
        num_tokens = int(query_lens.sum())
        sampled_rows = rows[sampled]
        batch = InputBatch(
            rows, query_lens, num_tokens, sampled, sampled_rows, _NONE, None, sampled_rows, None, float(num_tokens)
        )
        shape = self._graphs.padded(batch.shape)
        self._inputs.stage(batch, step, self._block_tables, shape)
        hidden = self._graphs.run("forward", shape, lambda: self._forward(shape))
        if len(sampled):
            self._graphs.run("sample", shape, lambda: self._sample(hidden, shape))

    def _forward(self, shape: BatchShape) -> Tensor:
        input_ids, context = self._inputs.gather(
            shape, self._rows, self._block_tables, self._block_size, self._split_size
        )
        return self._model.forward(input_ids, context)

    def _sample(self, hidden: Tensor, shape: BatchShape) -> Tensor:
        logits = self._model.compute_logits(self._inputs.select_sampled(shape, hidden))
        rows = self._inputs.sample_rows(shape.num_sampled)
        return sample_tokens(logits, rows, self._rows.columns, self._rows.token_ids)


def with_blocks_of(step: Step, indices: np.ndarray) -> Step:
    """What `DraftSteps.run` needs of a step for the requests at these indices of it."""
    counts = step.num_new_blocks.sum(axis=1)
    if not len(step.new_block_ids):
        return replace(NO_STEP, num_new_blocks=step.num_new_blocks[indices])
    ends = counts.cumsum()
    ids = [step.new_block_ids[ends[i] - counts[i] : ends[i]] for i in indices.tolist()]
    return replace(NO_STEP, num_new_blocks=step.num_new_blocks[indices], new_block_ids=np.concatenate(ids))


def without_blocks(num_reqs: int, num_groups: int) -> Step:
    """As `with_blocks_of`, in a later round."""
    return replace(NO_STEP, num_new_blocks=np.zeros((num_reqs, num_groups), dtype=np.int64))

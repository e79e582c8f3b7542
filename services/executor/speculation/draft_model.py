"""Drafts of another, smaller model with the same vocabulary.

It computes the tokens that it drafts from: those of prompts in the same steps as the target, those of outputs when it
drafts behind them. While nothing is drafted it falls behind, by at most CATCH_UP tokens of each request: several tokens
at once cost little more than one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import BatchShape, InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device import memory
from pagewire.services.executor.graphs.capture_sizes import drafter_shapes
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.sampling.tokens import OWN_TOKENS
from pagewire.services.executor.speculation import draft_cache
from pagewire.services.executor.speculation.draft_cache import Filled
from pagewire.services.executor.speculation.draft_steps import DraftSteps, Target, with_blocks_of
from pagewire.services.executor.speculation.model_proposer import ModelProposer
from pagewire.services.executor.step.step import Step

CATCH_UP = 32
# Tokens of a request in a captured step: those of a short query. The model may lack tokens that steps in flight have
# drafted, or tokens of steps without drafts.
MOST_CAPTURED = 16


class DraftModel(ModelProposer):
    """A drafting model with its own KV cache."""

    methods = ("draft_model",)
    lag = 0  # number of a row's last tokens without a position; if there are any, it waits for the target's step

    def __init__(self, target: Target, drafter: Model, max_draft_tokens: int, max_len: int) -> None:
        """max_len: limit of requests that are drafted for, drafts included."""
        self.max_draft_tokens = max_draft_tokens
        self._target, self._drafter, self._max_len = target, drafter, max_len
        self._is_alone = target.tokens is OWN_TOKENS  # else all ranks must compute the same tokens
        limits = target.limits
        self.kv_caches = draft_cache.allocate(drafter, target.model, target.num_blocks, limits, target.device)
        self._group = draft_cache.places(drafter, target.model)[0]
        self._filled = Filled(limits.max_num_seqs, len(self.kv_caches[0]), self._group, limits.block_size)

    def on_other_contents(self, group: int, blocks: np.ndarray) -> None:
        if group == self._group:
            self._filled.take(blocks)

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        if self._steps is None:
            self._steps = self._make_steps(state, block_tables)
        rows, filled = batch.rows, self._filled
        filled.admit(rows, state, block_tables)
        filled.take(self._new_blocks(step, block_tables))
        least, most = self._num_tokens(rows, state)
        asked = np.zeros_like(rows) if step.num_draft_tokens is None else step.num_draft_tokens
        counts = np.where((most + asked <= self._max_len) & (least > self.lag), asked, 0)
        # Nothing is left of its drafts, nor of the drafts behind a wrong one.
        filled.rows[rows] = np.minimum(filled.rows[rows], np.maximum(least - 1 - self.lag, 0))
        ends = self._num_computed(rows, state) + (0 if self.lag else batch.query_lens - asked)
        ends = np.where(counts > 0, most, np.minimum(most, ends + self.lag)) - self.lag
        missing = np.minimum(ends, self._max_len) - filled.rows[rows]
        missing[(missing < 0) | (counts == 0) & (missing < CATCH_UP)] = 0
        if missing.any():
            self._compute(step, batch, missing, counts, most, block_tables)
            self._steps.draft(step, batch, counts, is_begun=True)
            for index in np.flatnonzero(counts > 0).tolist():
                num_known = int(least[index]) - self.lag
                num_drafts = 0 if self.lag else int(counts[index]) - 1
                filled.fill(int(rows[index]), num_known + num_drafts, num_known, block_tables)
        return None if (counts == asked).all() else counts

    def _make_steps(self, state: RequestState, block_tables: BlockTables) -> DraftSteps:
        return DraftSteps(self._drafter, self._target, state, block_tables)

    def _compute(
        self,
        step: Step,
        batch: InputBatch,
        missing: np.ndarray,
        counts: np.ndarray,
        num_tokens: np.ndarray,
        block_tables: BlockTables,
    ) -> None:
        """Computes the missing tokens of each request, in as many steps as needed, and its first draft."""
        assert self._steps is not None
        behind = np.zeros(self._target.limits.max_num_seqs, dtype=np.int64)
        behind[batch.rows] = num_tokens - self._filled.rows[batch.rows]
        self._steps.start(behind)
        left, budget = missing.copy(), self._target.limits.max_num_batched_tokens
        while left.any():
            before = left.cumsum() - left
            lens = np.clip(budget - before, 0, left)
            indices = np.flatnonzero(lens)
            left -= lens
            sampled = np.flatnonzero((counts[indices] > 0) & (left[indices] == 0))
            self._steps.run(with_blocks_of(step, indices), batch.rows[indices], lens[indices], sampled)
            for row, count in zip(batch.rows[indices].tolist(), lens[indices].tolist(), strict=True):
                end = int(self._filled.rows[row]) + count
                self._filled.fill(row, end, end, block_tables)

    def _num_tokens(self, rows: np.ndarray, state: RequestState) -> tuple[np.ndarray, np.ndarray]:
        """Returns the least and the most tokens that each row can have: what the host knows without waiting."""
        if memory.is_shared(self._target.device):
            exact = state.columns.num_tokens.numpy()[rows]
            return exact, exact
        if self._is_alone:
            return state.least_num_tokens(rows), state.num_tokens[rows]
        return state.common_bounds(rows)

    def _num_computed(self, rows: np.ndarray, state: RequestState) -> np.ndarray:
        if memory.is_shared(self._target.device):
            return state.columns.num_computed_tokens.numpy()[rows]
        ahead = 0 if self._is_alone else state.common_bounds(rows)[1] - state.num_tokens[rows]
        return state.num_computed_tokens[rows] + ahead

    def _new_blocks(self, step: Step, block_tables: BlockTables) -> np.ndarray:
        """Returns the block ids of the observed group."""
        groups = np.tile(np.arange(block_tables.num_groups), len(step.num_new_blocks))
        return step.new_block_ids[np.repeat(groups, step.num_new_blocks.ravel()) == self._group]

    def graph_shapes(self, sizes: Sequence[int], prompts: Sequence[int] = ()) -> list[BatchShape]:
        return drafter_shapes(sizes, self._target.limits, MOST_CAPTURED, prompts)

    def on_other_drafts(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        self._filled.rows[rows] = np.minimum(self._filled.rows[rows], num_tokens)

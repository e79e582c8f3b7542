"""Proposers draft tokens: a step then checks several of a request's next tokens at once and keeps the right ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import BatchShape, InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.graphs.cuda_graphs import Record
from pagewire.services.executor.progress import Progress
from pagewire.services.executor.step.step import Step


class Proposer:
    """Drafts on the device, before the step that checks them, without waiting for the device.

    What it drafts changes how many tokens a step gains, never which: a draft counts if it is the token that would have
    been sampled in its place. All ranks of an executor must draft the same.
    """

    max_draft_tokens: int  # most drafts of a request in one step
    kv_caches: Sequence[Tensor] = ()  # of a model of its own, beside the target's

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        """Writes token ids of the vocabulary behind the known tokens of each request that is to have drafts:
        batch.num_samples - 1 of batch.sampled_rows, to state.token_ids[row, n:], n = state.columns.num_tokens[row].

        Called in every step that computes something, also without drafts, once its blocks are counted in block_tables;
        the device's tables get them when the step gathers its inputs.

        n must be read on the device: results of steps in flight decide it, and the host's count is an upper bound.
        Returns how many were drafted, int64 [n] parallel to step.request_ids, where the host can know it without
        waiting: the step is then so much smaller. None: as many as asked.
        """
        raise NotImplementedError

    def on_other_drafts(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Behind the first num_tokens [n] of these rows [n] stand other tokens than were drafted in this step."""

    def reset(self) -> None:
        """All requests are forgotten."""

    def on_other_weights(self) -> None:
        """The model has other weights."""

    # Of a model of its own, whose steps are launched beside the target's.

    def record_missing(self) -> bool:
        """As of `ModelRunner`, of a step of this model."""
        return False

    def graph_shapes(self, sizes: Sequence[int], prompts: Sequence[int] = ()) -> list[BatchShape]:
        """Of its steps beside those of so many requests, and those with prompts of so many tokens, falling in
        tokens."""
        return []

    def capture(self, shapes: Sequence[BatchShape], progress: Progress, record: Record) -> None:
        """After the first step with drafts; without one, there is nothing to capture."""


class _NoDrafts(Proposer):
    max_draft_tokens = 0

    def propose(self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables) -> None:
        return None


NO_DRAFTS: Proposer = _NoDrafts()

"""Proposers draft tokens: a step then checks several of a request's next tokens at once and keeps the correct ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import BatchShape, InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.graphs.cuda_graphs import Record
from pagewire.services.executor.step.step import Step


class Proposer:
    """Drafts on the device, before the step that checks the drafts, without waiting for the device.

    Drafts change the number of tokens that a step gains, never the tokens: a draft is accepted if it is the token that
    would have been sampled in its place. All ranks of an executor must draft the same.
    """

    max_draft_tokens: int  # most drafts of a request in one step
    methods: Sequence[str] = ("drafts",)  # names of the ways to draft that a step can choose from
    kv_caches: Sequence[Tensor] = ()  # of its own model, in addition to the target's

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        """Writes drafts behind the known tokens of each request that has some: batch.num_samples - 1 token ids of the
        vocabulary for batch.sampled_rows, to state.token_ids[row, n:], n = state.columns.num_tokens[row].

        Called in every step that computes something, also without drafts, once its blocks are counted in block_tables;
        the device's tables get them when the step gathers its inputs.

        n must be read on the device: it depends on steps in flight, and the host's count is an upper bound.
        Returns the numbers of drafts, int64 [n] parallel to step.request_ids, if the host knows them without waiting:
        the step is then reduced to them. None: as many as asked.
        """
        raise NotImplementedError

    def prefer(self, method: int) -> bool:
        """Drafts by this method where a step names none. Returns False if it is not prepared yet and finds nothing."""
        return True

    def on_other_drafts(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Informs the proposer that its drafts behind the first num_tokens [n] of these rows [n] were replaced."""

    def on_other_contents(self, group: int, blocks: np.ndarray) -> None:
        """Informs the proposer that these blocks int64 [n] of a group hold other tokens than those it has computed."""

    def reset(self) -> None:
        """Forgets all requests."""

    def on_other_weights(self) -> None:
        """Forgets what was computed with the previous weights."""

    # For a proposer with its own model, which launches steps in addition to the target's.

    def prepare(self) -> bool:
        """Prepares a part of what it was not given time for at start, for some 0.1 s. Returns False if nothing is
        left."""
        return False

    def record_missing(self) -> bool:
        """Records a missing step of its model, as `ModelRunner.record_missing` does."""
        return False

    def graph_shapes(self, sizes: Sequence[int], prompts: Sequence[int] = ()) -> list[BatchShape]:
        """Returns the shapes of its steps that accompany target steps of these numbers of requests, and steps with
        prompts of these numbers of tokens; by descending tokens."""
        return []

    def capture(self, shapes: Sequence[BatchShape], progress: Progress, record: Record) -> None:
        """Captures steps of these shapes. Called after the first step with drafts."""


class _NoDrafts(Proposer):
    max_draft_tokens = 0

    def propose(self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables) -> None:
        return None


NO_DRAFTS: Proposer = _NoDrafts()

"""Several methods in one executor: a step names the method of each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import BatchShape, InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.graphs.cuda_graphs import Record
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.step.step import Step


class SeveralProposers(Proposer):
    """Proposers that have no KV cache and need no call in steps for which they do not draft."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        """proposers: one for each method; the first drafts where a step names none."""
        self._proposers = proposers
        self._preferred = 0
        self.methods = [name for proposer in proposers for name in proposer.methods]
        self.max_draft_tokens = max(proposer.max_draft_tokens for proposer in proposers)

    def prefer(self, method: int) -> bool:
        self._preferred = method
        return self._proposers[method].prefer(0)

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        asked = step.num_draft_tokens
        if asked is None or batch.num_samples is None:
            return None
        chosen = np.full_like(asked, self._preferred) if step.draft_methods is None else step.draft_methods
        counts = np.zeros_like(asked)  # a method that the executor does not have finds nothing
        for method, proposer in enumerate(self._proposers):
            mine = np.where(chosen == method, asked, 0)
            if mine.any():
                drafted = proposer.propose(replace(step, num_draft_tokens=mine), batch, state, block_tables)
                counts += mine if drafted is None else drafted
        return counts

    def on_other_drafts(self, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        for proposer in self._proposers:
            proposer.on_other_drafts(rows, num_tokens)

    def reset(self) -> None:
        for proposer in self._proposers:
            proposer.reset()

    def on_other_weights(self) -> None:
        for proposer in self._proposers:
            proposer.on_other_weights()

    def prepare(self) -> bool:
        return any(proposer.prepare() for proposer in self._proposers)

    def record_missing(self) -> bool:
        return any(proposer.record_missing() for proposer in self._proposers)

    def graph_shapes(self, sizes: Sequence[int], prompts: Sequence[int] = ()) -> list[BatchShape]:
        return next((shapes for one in self._proposers if (shapes := one.graph_shapes(sizes, prompts))), [])

    def capture(self, shapes: Sequence[BatchShape], progress: Progress, record: Record) -> None:
        for proposer in self._proposers:
            proposer.capture(shapes, progress, record)

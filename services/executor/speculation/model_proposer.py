"""The base class of proposers with their own model."""

from __future__ import annotations

from collections.abc import Sequence

from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.device.progress import Progress
from pagewire.services.executor.graphs.cuda_graphs import Record
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.speculation.draft_steps import DraftSteps


class ModelProposer(Proposer):
    """Drafts by steps of a model."""

    _steps: DraftSteps | None = None  # made in the first step, which has the rows

    def record_missing(self) -> bool:
        return self._steps is not None and self._steps.record_missing()

    def capture(self, shapes: Sequence[BatchShape], progress: Progress, record: Record) -> None:
        if self._steps is not None:
            self._steps.capture(shapes, progress, record)

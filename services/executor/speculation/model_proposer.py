"""What proposers with a model of their own have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pagewire.services.executor.cuda_graphs import Function, Graph
from pagewire.services.executor.input_batch import BatchShape
from pagewire.services.executor.speculation.draft_steps import DraftSteps
from pagewire.services.executor.speculation.proposer import Proposer


class ModelProposer(Proposer):
    """Drafts by steps of a model."""

    _steps: DraftSteps | None = None  # made with the first step, which brings the rows

    def record_missing(self) -> bool:
        return self._steps is not None and self._steps.record_missing()

    def capture(
        self,
        shapes: Sequence[BatchShape],
        progress: Callable[[float, str], None],
        record: Callable[[Function], Graph],
    ) -> None:
        if self._steps is not None:
            self._steps.capture(shapes, progress, record)

"""The seam for pipelines: what a model runner exchanges with the stages before and behind its own."""

from __future__ import annotations

from torch import Tensor

from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.clock import StageTimes
from pagewire.services.executor.step.step import DraftedStep, Step
from pagewire.services.executor.step.step_context import Stream


class StageExchange:
    """Nothing: the runner has the whole model. Pipelines override it."""

    is_last = True

    def begin(self, step: Step, state: RequestState) -> None:
        """Begins a step; the state is the one before it."""

    def stream(self, num_tokens: int) -> Stream | None:
        """Returns the memory in which the model finds and leaves what stages hand on; num_tokens with padding."""
        return None

    def receive(self, batch: InputBatch, state: RequestState) -> None:
        """Waits for what the step needs of other stages."""

    def pass_on(self, batch: InputBatch, state: RequestState, drafted: DraftedStep | None) -> None:
        """Sends the stream to the next stage. drafted: receives what was gained, if the step has drafts."""

    def end(self, token_ids: Tensor | None) -> None:
        """Ends the step on the last stage. token_ids int64 [R]: what was sampled; None: nothing."""

    @property
    def times(self) -> StageTimes | None:
        """Times of the last step, on the last stage."""
        return None


NO_EXCHANGE = StageExchange()

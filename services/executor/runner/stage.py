"""The seam for pipelines: a model runner's exchange with the neighbouring stages."""

from __future__ import annotations

from torch import Tensor

from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device.clock import StageTimes
from pagewire.services.executor.step.step import DraftedStep, Step
from pagewire.services.executor.step.step_context import Stream


class StageExchange:
    """No exchange: the runner has the whole model. Pipelines override it."""

    is_last = True

    def begin(self, step: Step, state: RequestState) -> None:
        """Begins a step; the state is the one before it."""

    def stream(self, num_tokens: int) -> Stream | None:
        """Returns the stream's memory between stages, which the model reads and writes; num_tokens with padding."""
        return None

    def receive(self, batch: InputBatch, state: RequestState) -> None:
        """Waits for the step's inputs from other stages."""

    def pass_on(self, batch: InputBatch, state: RequestState, drafted: DraftedStep | None) -> None:
        """Sends the stream to the next stage. drafted: receives the gained tokens' numbers, if the step has drafts."""

    def end(self, token_ids: Tensor | None) -> None:
        """Ends the step on the last stage. token_ids int64 [R]: the sampled tokens; None: nothing was sampled."""

    def leave(self) -> None:
        """Takes what other stages have sent and nothing has received, as no step follows."""

    @property
    def times(self) -> StageTimes | None:
        """Returns the times of the last step, on the last stage."""
        return None


NO_EXCHANGE = StageExchange()

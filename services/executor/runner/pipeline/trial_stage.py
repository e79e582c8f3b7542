"""The exchange between stages that try weights before they are in force."""

from __future__ import annotations

import torch

from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.group import Group
from pagewire.services.executor.parallel.stage import WHOLE
from pagewire.services.executor.runner.pipeline.pipeline_stage import stream_of
from pagewire.services.executor.runner.stage import NO_EXCHANGE, StageExchange
from pagewire.services.executor.step.limits import Limits
from pagewire.services.executor.step.step import DraftedStep
from pagewire.services.executor.step.step_context import Stream


class TrialStage(StageExchange):
    """The exchange of stages that try new weights in one step, while other steps continue with the old ones: each stage
    broadcasts its stream to all ranks. No token is sampled for a second step."""

    def __init__(self, group: Group, stream: Stream) -> None:
        """stream: see PipelineStage."""
        self._stage, self._ranks, self._ranks_of_stage = group.stage, group.loading, group.tensor.size
        self.is_last = group.stage.is_last
        self._stream = stream

    def stream(self, num_tokens: int) -> Stream:
        return Stream(self._stream.hidden[:num_tokens], self._stream.residual[:num_tokens])

    def receive(self, batch: InputBatch, state: RequestState) -> None:
        self._receive_from(range(self._stage.index), batch.num_tokens)

    def pass_on(self, batch: InputBatch, state: RequestState, drafted: DraftedStep | None) -> None:
        self._receive_from(range(self._stage.index, self._stage.count - 1), batch.num_tokens)

    def _receive_from(self, stages: range, num_tokens: int) -> None:
        """Receives the stream of each of these stages in turn, from its first rank."""
        stream = self.stream(num_tokens)
        for stage in stages:
            root = (self._stage.count - 1 - stage) * self._ranks_of_stage
            for tensor in (stream.hidden, stream.residual):
                tensor.copy_(self._ranks.broadcast(tensor, root))


def trial_stage(group: Group, model: Model, limits: Limits, device: torch.device) -> StageExchange:
    """Returns the exchange of this rank for a single step with weights that are not in force."""
    return (
        NO_EXCHANGE
        if group.stage is WHOLE
        else TrialStage(group, stream_of(model, limits.max_num_batched_tokens, device))
    )

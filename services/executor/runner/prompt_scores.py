"""The seam for log probabilities of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.step.prompt_lines import PromptPart
from pagewire.services.executor.step.step import InvalidStep, Step


class PromptScores(Protocol):
    """The scored prompts that are being computed."""

    @property
    def max_lines(self) -> int:
        """The largest number of tokens that are scored at once."""

    def reset(self) -> None:
        """Forgets all requests."""

    def update(self, step: Step) -> None:
        """Removes finished requests and adds new ones. Raises InvalidStep."""

    def compute(
        self, hidden: Tensor, batch: InputBatch, step: Step, state: RequestState
    ) -> tuple[Sequence[PromptPart], dict[str, Tensor]]:
        """Returns the step's parts of prompts, in batch order, and the lines of all, by the names that
        `prompt_lines.take_lines` expects. hidden [num_tokens, hidden_size]; the state is the one before the step."""


class _NoPromptScores:
    """Scores no prompt."""

    max_lines = 1

    def reset(self) -> None:
        pass

    def update(self, step: Step) -> None:
        if any(request.sampling.HasField("prompt_logprobs") for request in step.new_requests):
            raise InvalidStep("a new request wants log probabilities of its prompt, which this runner does not support")

    def compute(
        self, hidden: Tensor, batch: InputBatch, step: Step, state: RequestState
    ) -> tuple[Sequence[PromptPart], dict[str, Tensor]]:
        return (), {}


NO_PROMPT_SCORES: PromptScores = _NoPromptScores()

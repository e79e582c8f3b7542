"""The values that pass between the scheduler and its executors. Fields carry the names of `executor.proto`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.services.scheduler.request import Request
from pagewire.services.scheduler.sampling_params import SamplingParams


class InvalidResult(Exception):
    """The executor answered something that it was not asked."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the executor."""

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams
    yields_vector: bool = False


@dataclass(slots=True)
class ScheduledStep:
    """One scheduling decision, as columns over the n requests that run."""

    step_id: int
    finished_request_ids: list[int] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    request_ids: list[int] = field(default_factory=list)  # [n]
    num_scheduled_tokens: list[int] = field(default_factory=list)  # [n], drafts included
    num_draft_tokens: list[int] = field(default_factory=list)  # [n], or empty: nobody has any
    num_new_blocks: list[int] = field(default_factory=list)  # [n]
    new_block_ids: list[int] = field(default_factory=list)  # [sum(num_new_blocks)]

    # Not sent. Who enters, parallel to new_requests.
    admitted: list[Request] = field(default_factory=list)
    # Not sent. Who gains tokens, in batch order, with the epoch in which each was scheduled and the most it may gain.
    sampled: list[Request] = field(default_factory=list)  # [s]
    epochs: list[int] = field(default_factory=list)  # [s]
    max_gains: list[int] = field(default_factory=list)  # [s]

    def add(self, request: Request, num_tokens: int, num_drafts: int, block_ids: list[int]) -> None:
        """Lets a request run num_tokens tokens, of which the last num_drafts are drafts."""
        if num_drafts and not self.num_draft_tokens:
            self.num_draft_tokens = [0] * len(self.request_ids)
        self.request_ids.append(request.request_id)
        self.num_scheduled_tokens.append(num_tokens)
        if self.num_draft_tokens or num_drafts:
            self.num_draft_tokens.append(num_drafts)
        self.num_new_blocks.append(len(block_ids))
        if block_ids:
            self.new_block_ids += block_ids

    def add_sampled(self, request: Request, max_gain: int) -> None:
        """The request, added before, reaches its last known token: it gains up to max_gain tokens."""
        self.sampled.append(request)
        self.epochs.append(request.epoch)
        self.max_gains.append(max_gain)

    def check(self, result: "StepResult") -> None:
        """Raises InvalidResult unless the result is this step's, with no more tokens for anyone than were asked for."""
        if result.step_id != self.step_id:
            raise InvalidResult(f"the executor answered step {result.step_id} instead of step {self.step_id}")
        if result.request_ids != [request.request_id for request in self.sampled]:
            raise InvalidResult(f"the executor answered step {self.step_id} for other requests than it was to sample")
        num_tokens = result.num_tokens
        if len(num_tokens) != len(self.sampled) or sum(num_tokens) != len(result.token_ids):
            raise InvalidResult(f"the columns of the answer to step {self.step_id} differ in length")
        if num_tokens == self.max_gains:
            return
        for request, num, most in zip(self.sampled, num_tokens, self.max_gains, strict=True):
            if not 0 <= num <= most:
                raise InvalidResult(
                    f"the executor answered step {self.step_id} with {num} tokens for request {request.request_id}, "
                    f"which could gain {most}"
                )


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step, as columns over the requests that were sampled, in batch order."""

    step_id: int
    request_ids: list[int]  # [s]
    num_tokens: list[int]  # [s], gained by each
    token_ids: list[int]  # [sum(num_tokens)]
    # Index into request_ids -> log probabilities of the tokens it gained, which the scheduler only passes on.
    logprobs: Mapping[int, Any] = field(default_factory=dict)
    # Index into request_ids -> the vector that a request yields instead of tokens.
    vectors: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepClock:
    """What the executor measured of one step, seconds."""

    execute_seconds: float  # of the device
    queue_seconds: float  # in the executor's queue
    idle_seconds: float | None  # the device waited for the step; None for a stream's first


@dataclass(slots=True)
class Outputs:
    """What a step brought to the requests that are still alive, in parallel columns."""

    requests: list[Request] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)  # of each, up to the request's end
    # Index into requests -> log probabilities of these tokens, and perhaps of some behind the end.
    logprobs: dict[int, Any] = field(default_factory=dict)
    # Index into requests -> the vector of a request that ended with it.
    vectors: dict[int, Any] = field(default_factory=dict)

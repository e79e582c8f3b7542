"""The values that pass between the scheduler and its executor. Fields carry the names of `executor.proto`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.services.scheduler.request import Request
from pagewire.v1.common_pb2 import SamplingParams


class ProtocolError(Exception):
    """The executor answered something it was not asked."""


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor described of itself: its model and its capacity."""

    incarnation: int
    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_logprobs: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def max_num_tokens(self) -> int:
        """Longest request, prompt plus output, that the model takes and the KV cache can hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the executor."""

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling_params: SamplingParams


@dataclass(slots=True)
class Step:
    """One scheduling decision, as columns over the n requests that run."""

    step_id: int
    finished_request_ids: list[int] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    request_ids: list[int] = field(default_factory=list)  # [n]
    num_scheduled_tokens: list[int] = field(default_factory=list)  # [n]
    num_new_blocks: list[int] = field(default_factory=list)  # [n]
    new_block_ids: list[int] = field(default_factory=list)  # [sum(num_new_blocks)]

    # Not sent. Who enters, parallel to new_requests, and who gains a token, in batch order, with the epoch in
    # which each was scheduled.
    admitted: list[Request] = field(default_factory=list)
    sampled: list[Request] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def check(self, result: "StepResult") -> None:
        """Raises ProtocolError unless the result is this step's, with one token for each request it sampled."""
        if result.step_id != self.step_id:
            raise ProtocolError(f"the executor answered step {result.step_id} instead of step {self.step_id}")
        if result.request_ids != [request.request_id for request in self.sampled]:
            raise ProtocolError(f"the executor answered step {self.step_id} for other requests than it was to sample")
        if any(num != 1 for num in result.num_tokens) or len(result.token_ids) != len(self.sampled):
            raise ProtocolError(f"the executor did not answer step {self.step_id} with one token per request")


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step, as columns over the requests that were sampled, in batch order."""

    step_id: int
    request_ids: list[int]
    num_tokens: list[int]
    token_ids: list[int]
    # Index into request_ids -> log probabilities, which the scheduler only passes on.
    logprobs: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepClock:
    """What the executor measured of one step, seconds."""

    execute_seconds: float  # of the device
    queue_seconds: float  # in the executor's queue
    idle_seconds: float | None  # the device waited for the step; None for a stream's first


@dataclass(slots=True)
class Outputs:
    """What a step brought to the requests that are still alive: one token each, in parallel columns."""

    requests: list[Request] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    # Index into requests -> log probabilities of the token.
    logprobs: dict[int, Any] = field(default_factory=dict)

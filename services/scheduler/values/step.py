"""The values that pass between the scheduler and its executors. Fields carry the names of `executor.proto`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire.services.scheduler.values.images import MAX_STEP_IMAGE_BYTES, NO_IMAGES, PromptImages
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.common_pb2 import SamplingParams
from pagewire.v1.executor_pb2 import KVLoaded, StepRequest


class InvalidResult(Exception):
    """Raised for a result that does not match its step."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive entries of a block table."""

    first: int
    ids: list[int]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that enters the executor."""

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: list[Blocks]  # [G], by group
    sampling_params: SamplingParams
    yields_vector: bool = False
    second_text_start: int = 0
    images: PromptImages = NO_IMAGES
    draft_domain: int = 0  # requests of one domain may find each other's blocks
    adapter_slot: int = 0

    @classmethod
    def of(cls, request: Request) -> "NewRequest":
        """Returns the values of an admitted request that the executor needs."""
        return cls(
            request.request_id,
            list(request.token_ids),
            request.num_prompt_tokens,
            request.num_computed_tokens,
            [Blocks(held.first, held.ids) for held in request.blocks.held],
            request.sampling_params,
            request.yields_vector,
            request.second_text_start,
            request.images,
            int.from_bytes(request.blocks.root_hash[:8]),
            request.adapter_slot,
        )


@dataclass(slots=True)
class StepWork:
    """The work of a step."""

    num_decodes: int = 0  # tokens of requests that need one, drafts included
    num_prompt_tokens: int = 0
    num_pairs: float = 0.0  # of prompt tokens and the tokens they attend to, with full attention

    def add_prompt(self, start: int, num_tokens: int) -> None:
        """Adds tokens of a prompt, from position `start` on."""
        self.num_prompt_tokens += num_tokens
        self.num_pairs += num_tokens * (start + num_tokens / 2)


@dataclass(slots=True)
class ScheduledStep:
    """One scheduling decision, as columns over the n requests that run."""

    step_id: int
    finished_request_ids: list[int] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    request_ids: list[int] = field(default_factory=list)  # [n]
    num_scheduled_tokens: list[int] = field(default_factory=list)  # [n], drafts included
    num_new_blocks: list[int] = field(default_factory=list)  # [n, G] row by row
    new_block_ids: list[int] = field(default_factory=list)  # [sum(num_new_blocks)]
    adapter_slots: list[tuple[int, str]] = field(default_factory=list)  # slots, and digests of their new adapters
    tiers: StepRequest | None = None  # saves and loads

    # Not sent. Bytes of the images of requests that enter.
    num_image_bytes: int = 0
    # Not sent. Requests that enter, parallel to new_requests.
    admitted: list[Request] = field(default_factory=list)
    # Not sent. Requests that gain tokens, in batch order, and the epoch in which each was scheduled.
    sampled: list[Request] = field(default_factory=list)  # [s]
    epochs: list[int] = field(default_factory=list)  # [s]
    # Index into sampled -> how many of its scheduled tokens are drafts.
    drafts_of: dict[int, int] = field(default_factory=dict)
    draft_methods: Mapping[int, int] = field(default_factory=dict)  # id -> the method of its drafts; none: the first
    # Not sent. Requests that yield a vector, in batch order, with the epoch; results have them after `sampled`.
    yielding: list[tuple[Request, int]] = field(default_factory=list)  # [v]
    # Not sent. The work of the step.
    work: StepWork = field(default_factory=StepWork)

    @property
    def takes_more(self) -> bool:
        """True if another request may enter with the step, as its images still fit into a message."""
        return self.num_image_bytes < MAX_STEP_IMAGE_BYTES

    def check(self, result: "StepResult") -> None:
        """Raises InvalidResult unless the result belongs to this step, with at most the scheduled tokens of each
        request."""
        if result.step_id != self.step_id:
            raise InvalidResult(f"the executor answered step {result.step_id} instead of step {self.step_id}")
        request_ids = [request.request_id for request in self.sampled]
        request_ids += [request.request_id for request, _ in self.yielding]
        if result.request_ids != request_ids:
            raise InvalidResult(f"the executor answered step {self.step_id} for other requests than those of the step")
        num_tokens = result.num_tokens
        if len(num_tokens) != len(request_ids) or sum(num_tokens) != len(result.token_ids):
            raise InvalidResult(f"the columns of the answer to step {self.step_id} differ in length")
        if self.drafts_of or not {0, 1}.issuperset(num_tokens):
            for i, (request, num) in enumerate(zip(self.sampled, num_tokens, strict=False)):
                if not 0 <= num <= (most := 1 + self.drafts_of.get(i, 0)):
                    raise InvalidResult(
                        f"the executor answered step {self.step_id} with {num} tokens for request "
                        f"{request.request_id}, which could gain {most}"
                    )
        for i in range(len(self.sampled), len(request_ids)):
            if num_tokens[i] or i not in result.vectors:
                raise InvalidResult(
                    f"the executor answered step {self.step_id} without the vector of request {request_ids[i]}"
                )


@dataclass(slots=True)  # a frozen one takes twice as long to make
class StepResult:
    """The outcome of one step, as columns over the requests that were sampled, then those that yield a vector."""

    step_id: int
    request_ids: list[int]  # [s + v]
    num_tokens: list[int]  # [s + v], that each gained
    token_ids: list[int]  # [sum(num_tokens)]
    # Index into request_ids -> log probabilities of the tokens it gained, which the scheduler only passes on.
    logprobs: Mapping[int, Any] = field(default_factory=dict)
    # Index into request_ids -> the vector that a request yields instead of tokens.
    vectors: Mapping[int, Any] = field(default_factory=dict)
    # Id of a request that entered with the step -> the error that it ends with, which the scheduler only passes on.
    errors: Mapping[int, Any] = field(default_factory=dict)
    # Index into request_ids -> log probabilities of its prompt, which the scheduler only passes on.
    prompt_logprobs: Mapping[int, Any] = field(default_factory=dict)
    num_drafted: list[int] = field(default_factory=list)  # [s + v], checked drafts of each; empty: none
    loaded: Sequence[KVLoaded] = ()  # loads that ended; then it answers no step

    def drafted(self, index: int) -> int:
        """Returns how many tokens were drafted for the request at this index; may be fewer than scheduled."""
        return self.num_drafted[index] if self.num_drafted else 0


@dataclass(slots=True)
class StepClock:
    """The times of one step in seconds, as the executor measured them."""

    execute_seconds: float  # on the device; in a pipeline, on the slowest stage
    queue_seconds: float  # in the executor's queue
    idle_seconds: float | None  # in which the device, or the first stage's, waited for it; None for the first step

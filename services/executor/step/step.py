"""One step of the model runner: its input and its output. `convert` maps both to the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pagewire.services.executor.device.clock import StageTimes
from pagewire.services.executor.device.results import PendingResults
from pagewire.services.executor.step.failures import Failure, find_failures
from pagewire.services.executor.step.matcher import Matcher
from pagewire.services.executor.step.prompt_lines import PromptLines, PromptPart, take_lines
from pagewire.telemetry.trace import NO_TRACE, Trace
from pagewire.v1.common_pb2 import SamplingParams

# The largest number of alternatives with log probabilities that a request may ask for.
MAX_LOGPROBS = 20


class InvalidStep(ValueError):
    """A step that contradicts earlier steps; the scheduler must start a new stream."""


class InvalidImage(ValueError):
    """An image that the model cannot read; the message says what was expected, for the client."""


@dataclass(frozen=True)
class Blocks:
    """Consecutive entries of a block table."""

    first: int  # place of the first one
    ids: np.ndarray  # int32 [n]


@dataclass(frozen=True)
class Image:
    """An image of a prompt: the vision tower's input, and the place of its embeddings."""

    hash: bytes  # of all tensors
    offset: int  # of its first placeholder token
    num_tokens: int  # from its first placeholder to its last; tokens of other kinds may lie between
    tensors: Mapping[str, np.ndarray]  # by the names that transformers gives them


@dataclass(frozen=True)
class SlotChange:
    """A slot of the device that holds another adapter from this step on."""

    slot: int  # from 1
    digest: str
    adapter: object | None = None  # in host memory; None: it could not be read, so its requests fail


@dataclass(frozen=True)
class NewRequest:
    request_id: int
    token_ids: np.ndarray  # int32 [num_tokens], prompt, then output known so far
    num_prompt_tokens: int
    num_computed_tokens: int
    blocks: Sequence[Blocks]  # by group [G]
    sampling: SamplingParams  # with defaults
    trace: Trace = NO_TRACE
    yields_vector: bool = False  # yields a vector pooled from its tokens, instead of more tokens
    second_text_start: int = 0  # of a pair of texts, in token_ids; 0 = there is only one
    images: Sequence[Image] = ()  # in the order of the prompt
    failure: Failure | None = None  # why its results are worthless
    matcher: Matcher | None = None  # at its last token, if its tokens are restricted
    position_delta: int = 0  # see `StepContext.position_deltas`
    draft_domain: int = 0  # its output may be drafted for other requests of the same domain
    adapter_slot: int = 0  # from 1; 0 = it has no adapter


@dataclass(frozen=True)
class Step:
    """Applied in this order: finished, slots, new, blocks, run."""

    step_id: int
    request_ids: Sequence[int]  # [n], batch order
    num_scheduled_tokens: np.ndarray  # int64 [n]
    num_new_blocks: np.ndarray  # int64 [n, G]
    new_block_ids: np.ndarray  # int32 [sum(num_new_blocks)], row by row
    finished_request_ids: Sequence[int] = ()
    new_requests: Sequence[NewRequest] = ()
    num_draft_tokens: np.ndarray | None = None  # int64 [n], of num_scheduled_tokens; None = none
    draft_methods: np.ndarray | None = None  # int64 [n], the proposer's method for each; None = the first
    has_fixed_drafts: bool = False  # keeps their number even if a proposer finds fewer: only the shape counts
    slot_changes: Sequence[SlotChange] = ()

    def drafting(self, num_drafted: np.ndarray | None) -> Step:
        """Returns the step with num_drafted int64 [n] drafts, no more than it has; None: the same step."""
        if num_drafted is None or self.num_draft_tokens is None or self.has_fixed_drafts:
            return self
        if not (num_missing := self.num_draft_tokens - num_drafted).any():
            return self
        num_scheduled = self.num_scheduled_tokens - num_missing
        return replace(self, num_scheduled_tokens=num_scheduled, num_draft_tokens=num_drafted)


@dataclass(frozen=True)
class HostTokens:
    """The results of a step, on the host.

    The L lines of log probabilities belong to the tokens of all requests that want them, one request after the other.
    """

    num_tokens: np.ndarray  # int64 [R], tokens that each sampled request gained
    token_ids: np.ndarray  # int64 [sum(num_tokens)]; for NOT_A_NUMBER and other invalid ids see failures
    logprob_token_ids: np.ndarray | None = None  # int64 [L, 1 + num_top]
    logprobs: np.ndarray | None = None  # fp32 [L, 1 + num_top]
    ranks: np.ndarray | None = None  # int64 [L]
    vectors: np.ndarray | None = None  # fp32 [V, size]
    prompt_logprobs: Mapping[int, PromptLines] = field(default_factory=dict)  # by id, of requests just sampled first
    num_drafted: np.ndarray | None = None  # int64 [R], tokens that were drafted for each; None = none
    failures: Mapping[int, Failure] = field(default_factory=dict)  # by id: the request's results are worthless


@dataclass
class DraftedStep:
    """A step with drafts: its result tells the number of tokens that each request gains."""

    rows: np.ndarray  # int64 [R], of the requests that were sampled
    admissions: np.ndarray  # int64 [R], number of requests that the row had had, to detect a new one
    num_samples: np.ndarray  # int64 [R], drafts + 1
    num_gained: np.ndarray | None = None  # int64 [R], 1 to num_samples; set on the thread that waits for the result


@dataclass(frozen=True)
class StepOutput:
    """A launched step. Its tokens may still be in transit: `wait()` for them, on any thread.

    `logprobs_of` = (index into request_ids, alternatives wanted) of the requests that want log probabilities.
    """

    step_id: int
    request_ids: list[int]  # [R + V], those sampled, then those that yield a vector
    logprobs_of: list[tuple[int, int]]
    num_tokens: int  # computed
    pending: PendingResults | None
    drafted: DraftedStep | None = None
    vocab_size: int = 0
    failures: Mapping[int, Failure] = field(default_factory=dict)  # by id: known before there are results
    prompt_parts: Sequence[PromptPart] = ()  # what the results have of log probabilities of prompts
    stages: StageTimes | None = None  # of a pipeline

    def wait(self) -> HostTokens:
        results = {} if self.pending is None else self.pending.wait()
        prompts = take_lines(results, self.prompt_parts)
        vectors = results.pop("vectors", None)
        if "token_ids" not in results:
            nothing = np.empty(0, dtype=np.int64)
            failures = self._find_failures(nothing, nothing, vectors)
            return HostTokens(nothing, nothing, vectors=vectors, failures=failures)
        if self.drafted is None:
            num_gained, num_drafted = np.ones(len(results["token_ids"]), dtype=np.int64), None
        else:
            num_gained = results.pop("num_gained")
            results = self._gained(results, self.drafted.num_samples, num_gained)
            self.drafted.num_gained = num_gained
            num_drafted = self.drafted.num_samples - 1
        failures = self._find_failures(num_gained, results["token_ids"], vectors)
        return HostTokens(
            num_gained, vectors=vectors, prompt_logprobs=prompts, num_drafted=num_drafted, failures=failures, **results
        )

    def _find_failures(
        self, num_gained: np.ndarray, token_ids: np.ndarray, vectors: np.ndarray | None
    ) -> dict[int, Failure]:
        return find_failures(self.request_ids, num_gained, token_ids, vectors, self.vocab_size)

    def _gained(
        self, results: dict[str, np.ndarray], num_samples: np.ndarray, num_gained: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Returns the results of the first num_gained [R] of the num_samples [R] sampled positions of each request."""
        request = np.repeat(np.arange(len(num_samples)), num_samples)  # position -> index of its request
        is_gained = np.arange(len(request)) < (num_samples.cumsum() - num_samples + num_gained)[request]
        has_line = np.isin(request, [index for index, _ in self.logprobs_of])
        return {
            name: values[is_gained if name == "token_ids" else is_gained[has_line]] for name, values in results.items()
        }

"""One generation, as the scheduler sees it."""

import enum
from functools import partial

from pagewire.config.sampling_checks import check_for_model, check_num_prompt_logprobs, check_token_ids
from pagewire.errors import InvalidRequest, check_all
from pagewire.services.scheduler.values.account import NO_ACCOUNT
from pagewire.services.scheduler.values.block_hashes import root_hash
from pagewire.services.scheduler.values.blocks import RequestBlocks
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.images import NO_IMAGES, PromptImages
from pagewire.services.scheduler.values.lengths import too_long
from pagewire.services.scheduler.values.tenant import NO_TENANT, Tenant
from pagewire.v1.common_pb2 import SamplingParams


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.IntEnum):
    """The reasons why requests end, numbered as in common.proto."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


NO_TEXT = "this model is served for vectors and generates no text; set yields_vector"


class Request:
    """One generation: its tokens, the progress of its KV, and its end conditions.

    `token_ids` is the prompt followed by the output known so far. `num_output_placeholders` counts tokens that were
    sampled on the device but are not yet known here:

        token_ids                      [p p p p p o o]            num_tokens = 7
        with num_output_placeholders=1 [p p p p p o o ?]
        num_computed_tokens = 7        [k k k k k k k]            the next step computes "?" without knowing it

    With drafts, a step may yield fewer tokens than scheduled: until its result arrives, `num_output_placeholders` and
    `num_computed_tokens` are upper bounds, too high by the same number.
    """

    __slots__ = (
        "__weakref__",
        "account",
        "adapter_digest",
        "adapter_slot",
        "blocks",
        "epoch",
        "finish_reason",
        "has_grammar",
        "images",
        "is_accepted",
        "is_long",
        "is_resubmitted",
        "max_num_tokens",
        "num_cached_tokens",
        "num_charged_tokens",
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "replica_id",
        "request_id",
        "sampling_params",
        "second_text_start",
        "status",
        "stop_token_id",
        "stop_token_ids",
        "tenant",
        "token_ids",
        "weights_version",
        "yields_vector",
    )

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        resume_token_ids: list[int] | None = None,
        *,
        is_resubmitted: bool = False,
        yields_vector: bool = False,
        second_text_start: int = 0,
        images: PromptImages = NO_IMAGES,
        cache_salt: str = "",
        cache_owner: str = "",
        tenant: Tenant = NO_TENANT,
        weights_version: str = "",
        adapter_digest: str = "",
    ) -> None:
        """sampling_params: resolved, and never changed.

        is_resubmitted: an earlier attempt was admitted, so this one is not refused.

        yields_vector: it ends with its prompt and yields a vector instead of tokens. second_text_start: the position of
        the second text of a pair; 0 for a single text.

        cache_salt, cache_owner: blocks are shared only among requests with the same values.

        weights_version: that of the weights that generated its resumed tokens; empty: unknown. adapter_digest: that of
        the adapter that computes all of its tokens; empty: none.
        """
        self.request_id = request_id
        self.yields_vector = yields_vector
        self.second_text_start = second_text_start
        self.images = images
        self.blocks = RequestBlocks(root_hash(cache_salt, cache_owner, adapter_digest))
        self.adapter_digest = adapter_digest
        self.adapter_slot = 0  # on its present executor; 0: it has no adapter
        self.tenant = tenant
        self.weights_version = weights_version  # that of its present or last executor
        self.account = NO_ACCOUNT  # its tenant's, once the scheduler has taken in the request
        self.is_long = False  # a large part of its prompt is not in the prefix cache
        self.sampling_params = sampling_params
        # With a grammar, the executor applies min_tokens and ignore_eos: any end token that it samples ends the
        # request.
        self.has_grammar = sampling_params.HasField("grammar") and not yields_vector
        self.num_prompt_tokens = len(prompt_token_ids)
        self.is_resubmitted = is_resubmitted
        self.token_ids = [*prompt_token_ids, *(resume_token_ids or ())]
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_cached_tokens: int | None = None  # tokens of the prompt; set when first scheduled
        self.num_charged_tokens = 0  # of the prompt, to its tenant
        self.num_preemptions = 0
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None  # the entry of sampling_params.stop_token_ids that ended it
        # Changes whenever tokens in flight become void, because the request ended or was preempted.
        self.epoch = 0
        # Place in the queues, smaller first; given by the policy.
        self.order: tuple[int, int] = (0, 0)
        self.is_accepted = True  # by the executor, which checks images when a request enters
        self.replica_id: int | None = None  # of the replica that runs it; None if it waits or has ended

        # Resolved against an executor's model and capacity by `resolve`.
        self.max_num_tokens = 0
        self.stop_token_ids: frozenset[int] = frozenset()

    @property
    def num_certain_tokens(self) -> int:
        """The number of tokens that are certain to be known and to have KV after the steps in flight, even if no draft
        is accepted."""
        return min(self.num_computed_tokens, len(self.token_ids))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """True if the request runs, and more than its last token has to be computed."""
        return len(self.token_ids) + self.num_output_placeholders - self.num_computed_tokens > 1

    @property
    def ends_in_flight(self) -> bool:
        """True if the steps in flight reach the limit of its tokens, so that it ends with them at the latest."""
        return len(self.token_ids) + self.num_output_placeholders >= self.max_num_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if the executor must report log probabilities of the prompt with the first token, which requires that
        the whole prompt is computed."""
        if self.yields_vector or self.num_output_tokens:
            return False
        return self.sampling_params.HasField("prompt_logprobs")

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def resolve(self, info: ExecutorInfo) -> None:
        """Fixes the limits of the request for this executor.

        Raises:
            InvalidRequest: it does not fit the model or the KV cache.
        """
        num_prompt_tokens = self.num_prompt_tokens
        if info.kind and not self.yields_vector:
            raise InvalidRequest(NO_TEXT, "yields_vector")
        if num_prompt_tokens > info.max_prompt_tokens(self.yields_vector):
            raise InvalidRequest(too_long(num_prompt_tokens, info, self.yields_vector), "prompt_token_ids")
        params = self.sampling_params
        check_all(
            (
                partial(check_token_ids, "prompt_token_ids", self.token_ids, info.vocab_size),
                partial(check_for_model, params, info.vocab_size, info.max_logprobs, info.eos_token_ids),
            )
        )
        if self.wants_prompt_logprobs:
            check_num_prompt_logprobs(params, num_prompt_tokens)
        self.max_num_tokens = info.max_num_tokens
        if self.yields_vector:
            self.max_num_tokens = num_prompt_tokens + 1  # no token is scheduled beyond its prompt
        elif params.HasField("max_tokens"):
            self.max_num_tokens = min(self.max_num_tokens, num_prompt_tokens + params.max_tokens)
        self.stop_token_ids = frozenset(params.stop_token_ids)
        if self.has_grammar or not params.ignore_eos:
            self.stop_token_ids |= info.eos_token_ids

    def gain(self, token_ids: list[int], most: int) -> tuple[list[int], FinishReason | None]:
        """Takes in the tokens of a step that could have yielded `most`.

        Returns:
            The tokens up to the request's end, and why it ends with the last of them; None if it continues.
        """
        self.num_output_placeholders -= most
        self.num_computed_tokens -= most - len(token_ids)  # rejected drafts
        for index, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            reason = self.find_end()
            if reason is not None:
                return token_ids[: index + 1], reason
        return token_ids, None

    def find_end(self) -> FinishReason | None:
        """Returns why the request ends with its last known token, or None if it continues."""
        num_output_tokens = self.num_output_tokens
        # The executor does not sample end tokens among the first min_tokens; one that still appears there is text.
        if num_output_tokens > self.sampling_params.min_tokens or self.has_grammar:
            last = self.token_ids[-1]
            if last in self.stop_token_ids:
                self.stop_token_id = last if last in self.sampling_params.stop_token_ids else None
                return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_num_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """Ends the request; tokens in flight become void."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.replica_id = None
        self.num_output_placeholders = 0
        self.epoch += 1

    def preempt(self) -> None:
        """Returns the request to waiting, with its tokens and without KV; tokens in flight become void."""
        self.status = RequestStatus.WAITING
        self.replica_id = None
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions += 1
        self.epoch += 1

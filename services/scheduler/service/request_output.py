"""What a client is told about its request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.v1 import common_pb2
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams import Outbox

# Tokens and log probabilities that may wait for a client of a call of its own; one that does not read at all is cut
# off.
MAX_UNREAD = 32_768
# That may wait for a tokenizer service, of all its requests: some 50 MB. At 20,000 tokens per second it is a minute in
# which it reads nothing; who has waited then is taken for dead long before.
MAX_UNREAD_OF_STREAM = 1_048_576


@dataclass(slots=True)
class RequestOutput:
    """New tokens of one request, its counts so far, and how it ended if it did."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    # One Logprobs message per token; None unless asked for.
    logprobs: list[common_pb2.Logprobs] | None = None
    # Of the prompt, with the first token; None unless asked for.
    prompt_logprobs: common_pb2.Logprobs | None = None
    # What a request with yields_vector ended with.
    vector: common_pb2.Vector | None = None
    # Of the weights that make its tokens; with the first.
    weights_version: str = ""
    # Why it failed; finish_reason is then ERROR.
    error: RpcError | None = None

    @classmethod
    def of(cls, request: Request, token_ids: list[int]) -> "RequestOutput":
        """These tokens, which the request has just gained, and what else there is to say of it."""
        return cls(
            token_ids,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.num_cached_tokens or 0,
            request.finish_reason,
            request.stop_token_id,
        )

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None

    @property
    def size(self) -> int:
        """Tokens, log probabilities, those of the prompt too, and the vector's values."""
        size = len(self.token_ids)
        if self.logprobs:
            size += sum(len(logprobs.token_ids) for logprobs in self.logprobs)
        if self.prompt_logprobs is not None:
            size += len(self.prompt_logprobs.token_ids)
        return size + (len(self.vector.values) if self.vector is not None else 0)


# By the client's number of the request.
RequestOutbox = Outbox[int | None, RequestOutput]


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Returns one output that says the same as several of one request; it changes the first of them."""
    whole, last = outputs[0], outputs[-1]
    for newer in outputs[1:]:
        whole.token_ids += newer.token_ids
        if newer.logprobs:
            whole.logprobs = whole.logprobs or []
            whole.logprobs += newer.logprobs
        whole.prompt_logprobs = newer.prompt_logprobs if whole.prompt_logprobs is None else whole.prompt_logprobs
        whole.weights_version = whole.weights_version or newer.weights_version
    whole.num_output_tokens = last.num_output_tokens
    whole.num_cached_tokens = last.num_cached_tokens
    whole.finish_reason = last.finish_reason
    whole.stop_token_id = last.stop_token_id
    whole.vector = last.vector
    whole.error = last.error
    return whole


size_of: Callable[[RequestOutput], int] = attrgetter("size")
is_last: Callable[[RequestOutput], bool] = attrgetter("is_last")


def new_outbox() -> RequestOutbox:
    return Outbox(merged, size_of)

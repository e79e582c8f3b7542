"""The outputs of a request for its client."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.v1 import common_pb2
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams import Outbox

# The most unread tokens and log probabilities of a call with one request; a client that does not read is cut off.
MAX_UNREAD = 32_768
# The most unread tokens and log probabilities of all requests of a tokenizer service: about 50 MB, or a minute without
# a read at 20,000 tokens per second; a service that hangs is detected long before.
MAX_UNREAD_OF_STREAM = 1_048_576


@dataclass(slots=True)
class RequestOutput:
    """New tokens of one request, its counts so far and, once it has ended, how."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    # One Logprobs message per token; None unless asked for.
    logprobs: list[common_pb2.Logprobs] | None = None
    # Log probabilities of the prompt, with the first token; None unless asked for.
    prompt_logprobs: common_pb2.Logprobs | None = None
    # The result of a request with yields_vector.
    vector: common_pb2.Vector | None = None
    # The version of the weights of its tokens, with the first token.
    weights_version: str = ""
    # Set if the request failed; finish_reason is ERROR then.
    error: RpcError | None = None

    @classmethod
    def of(cls, request: Request, token_ids: list[int]) -> "RequestOutput":
        """Returns the output of these tokens, which the request has just gained, with its present counts and end."""
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
        """The number of tokens, log probabilities (including those of the prompt) and values of the vector."""
        size = len(self.token_ids)
        if self.logprobs:
            size += sum(len(logprobs.token_ids) for logprobs in self.logprobs)
        if self.prompt_logprobs is not None:
            size += len(self.prompt_logprobs.token_ids)
        return size + (len(self.vector.values) if self.vector is not None else 0)


# Keyed by the client's number of the request.
RequestOutbox = Outbox[int | None, RequestOutput]


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Merges consecutive outputs of one request into the first of them, which it returns."""
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

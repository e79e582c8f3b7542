"""What a client is told about its request."""

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
    _unread: int | None = None

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
    def unread(self) -> int:
        """Tokens and their log probabilities. Counted once: no output changes but by `merge`."""
        if self._unread is None:
            num_logprobs = sum(len(logprobs.token_ids) for logprobs in self.logprobs or ())
            self._unread = len(self.token_ids) + num_logprobs
        return self._unread

    @property
    def size(self) -> int:
        """Tokens, log probabilities, those of the prompt too, and the vector's values."""
        num_of_prompt = len(self.prompt_logprobs.token_ids) if self.prompt_logprobs is not None else 0
        return self.unread + num_of_prompt + (len(self.vector.values) if self.vector is not None else 0)

    def merge(self, newer: "RequestOutput") -> "RequestOutput":
        """What was not sent yet, and what happened since, as one."""
        self._unread = self.unread + newer.unread
        self.token_ids += newer.token_ids
        if newer.logprobs:
            self.logprobs = self.logprobs or []
            self.logprobs += newer.logprobs
        self.prompt_logprobs = newer.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs
        self.weights_version = self.weights_version or newer.weights_version
        self.num_output_tokens = newer.num_output_tokens
        self.num_cached_tokens = newer.num_cached_tokens
        self.finish_reason = newer.finish_reason
        self.stop_token_id = newer.stop_token_id
        self.vector = newer.vector
        self.error = newer.error
        return self


# By the client's number of the request.
RequestOutbox = Outbox[int | None, RequestOutput]


def new_outbox() -> RequestOutbox:
    return Outbox(RequestOutput.merge, attrgetter("unread"))

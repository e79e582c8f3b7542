"""What a client is told about its request."""

from dataclasses import dataclass

from pagewire.rpc import RpcError
from pagewire.services.scheduler.request import FinishReason
from pagewire.streams import Outbox
from pagewire.v1 import common_pb2

# Tokens that may wait for a client of a call of its own; one that does not read at all is cut off.
MAX_UNREAD = 32_768


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
    # Why it failed; finish_reason is then ERROR.
    error: RpcError | None = None

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None

    @property
    def size(self) -> int:
        """Tokens, log probabilities and the vector's values."""
        num_logprobs = sum(len(logprobs.token_ids) for logprobs in self.logprobs or ())
        if self.prompt_logprobs is not None:
            num_logprobs += len(self.prompt_logprobs.token_ids)
        return len(self.token_ids) + num_logprobs + (len(self.vector.values) if self.vector is not None else 0)

    def merge(self, newer: "RequestOutput") -> "RequestOutput":
        """What was not sent yet, and what happened since, as one."""
        self.token_ids += newer.token_ids
        self.logprobs = [*(self.logprobs or ()), *(newer.logprobs or ())] or None
        self.prompt_logprobs = newer.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs
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
    return Outbox(RequestOutput.merge)

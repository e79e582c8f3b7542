"""What a client is told about its request."""

from dataclasses import dataclass

from pagewire.rpc import RpcError
from pagewire.services.scheduler.request import FinishReason
from pagewire.streams import Outbox
from pagewire.v1 import common_pb2

# Tokens that may wait for a client of a call of its own; one that does not read at all is cut off.
MAX_UNREAD = 32_768


@dataclass(slots=True)
class News:
    """New tokens of one request, its counts so far, and how it ended if it did."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    # One Logprobs message per token; None unless asked for.
    logprobs: list[common_pb2.Logprobs] | None = None
    # What a request with yields_vector ended with.
    vector: common_pb2.Vector | None = None
    # Why it failed; finish_reason is then ERROR.
    error: RpcError | None = None


def merge(older: News, newer: News) -> News:
    """News that was not sent yet, and what happened since, as one."""
    older.token_ids += newer.token_ids
    older.logprobs = [*(older.logprobs or ()), *(newer.logprobs or ())] or None
    older.num_output_tokens = newer.num_output_tokens
    older.num_cached_tokens = newer.num_cached_tokens
    older.finish_reason = newer.finish_reason
    older.stop_token_id = newer.stop_token_id
    older.vector = newer.vector
    older.error = newer.error
    return older


# News by the client's number of the request.
NewsBox = Outbox[int | None, News]


def new_outbox() -> NewsBox:
    return Outbox(merge)

"""What a client is told about its request."""

from dataclasses import dataclass, field
from typing import Any

from pagewire.rpc import RpcError
from pagewire.streams import Outbox
from services.scheduler.request import FinishReason


@dataclass(slots=True)
class News:
    """New tokens of one request, its counts so far, and how it ended if it did."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    # One Logprobs message per token, if asked for.
    logprobs: list[Any] = field(default_factory=list)
    # Why it failed; finish_reason is then ERROR.
    error: RpcError | None = None


def merge(older: News, newer: News) -> News:
    """News that was not sent yet, and what happened since, as one."""
    older.token_ids += newer.token_ids
    older.logprobs += newer.logprobs
    older.num_output_tokens = newer.num_output_tokens
    older.num_cached_tokens = newer.num_cached_tokens
    older.finish_reason = newer.finish_reason
    older.stop_token_id = newer.stop_token_id
    older.error = newer.error
    return older


# News by the client's number of the request.
NewsBox = Outbox[int | None, News]


def new_outbox() -> NewsBox:
    return Outbox(merge)

"""Responses on their way to a client: merged while it does not read, and bounded."""

import grpc

from pagewire.rpc import RpcError
from pagewire.streams import Outbox
from protos.pagewire.v1 import inference_pb2

# Tokens and log probabilities of one request that may wait unread. Far more than any reader in trouble needs; a
# request's whole output usually fits.
MAX_UNREAD = 32_768

News = inference_pb2.GenerateResponse | RpcError
ResponseBox = Outbox[int, News]


def new_response_box() -> ResponseBox:
    """By request number."""
    return Outbox(merge)


def merge(older: News, newer: News) -> News:
    """Text, tokens and logprobs of both; the newer usage and end. An error replaces what was not read."""
    if isinstance(newer, RpcError) or isinstance(older, RpcError):
        return newer
    text = older.text + newer.text
    older.MergeFrom(newer)
    older.text = text
    return older


def num_unread(news: News | None) -> int:
    """Tokens and log probabilities in it."""
    if news is None or isinstance(news, RpcError):
        return 0
    # All tokens of a request come with the same number of alternatives.
    per_token = 1 + (1 + len(news.logprobs[0].top_logprobs) if news.logprobs else 0)
    return len(news.token_ids) * per_token


def unread_error() -> RpcError:
    return RpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the client has not read this request's output: more than {MAX_UNREAD} tokens wait. Read faster, or ask for "
        "fewer tokens or logprobs",
    )

"""Responses on their way to a client: merged while it does not read, and bounded."""

import grpc

from pagewire.rpc import RpcError
from pagewire.streams import Outbox
from protos.pagewire.v1 import inference_pb2

# Tokens and log probabilities of one request that may wait unread. Far more than any reader in trouble needs; a
# request's whole output usually fits.
MAX_UNREAD = 32_768

News = inference_pb2.GenerateResponse | RpcError


class Unread:
    """News of one request that its client has not read."""

    __slots__ = ("_news", "_texts")

    def __init__(self, news: News) -> None:
        self._news = news
        # Of merged responses, joined when they are read: a string that grows by a few characters each time is copied
        # as often.
        self._texts: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Tokens and log probabilities in it."""
        return num_unread(self._news)

    def merge(self, newer: "Unread") -> "Unread":
        """Text, tokens and logprobs of both; the newer usage and end. An error replaces what was not read."""
        if isinstance(newer._news, RpcError) or isinstance(self._news, RpcError):
            return newer
        if not self._texts:
            self._texts.append(self._news.text)
        self._texts.append(newer._news.text)
        self._news.MergeFrom(newer._news)
        return self

    def read(self) -> News:
        """What one message says for all of it."""
        if self._texts and not isinstance(self._news, RpcError):
            self._news.text = "".join(self._texts)
            self._texts = []
        return self._news


ResponseBox = Outbox[int, Unread]


def new_response_box() -> ResponseBox:
    """By request number."""
    return Outbox(Unread.merge)


def num_unread(news: News) -> int:
    """Tokens and log probabilities in it."""
    if isinstance(news, RpcError):
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

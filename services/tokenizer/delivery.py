"""Responses on their way to a client: merged while it does not read, and bounded."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from pagewire.rpc import RpcError
from pagewire.streams import Outbox
from pagewire.v1 import common_pb2, inference_pb2

# Tokens and log probabilities of one request that may wait unread. Far more than any reader in trouble needs; a
# request's whole output usually fits.
MAX_UNREAD = 32_768


@dataclass(slots=True)
class Delta:
    """More output of a request that goes on, and nothing else: most news, and cheaper than a message."""

    text: str
    token_ids: Sequence[int]
    usage: common_pb2.Usage  # of the request, up to now whenever it is read

    @property
    def response(self) -> inference_pb2.GenerateResponse:
        """The message that says it."""
        return inference_pb2.GenerateResponse(text=self.text, token_ids=self.token_ids, usage=self.usage)


News = inference_pb2.GenerateResponse | RpcError | Delta


class Unread:
    """News of one request that its client has not read."""

    __slots__ = ("_news", "_texts", "size")

    def __init__(self, news: News) -> None:
        self._news = news
        # Of merged responses, joined when they are read: a string that grows by a few characters each time is copied
        # as often.
        self._texts: list[str] = []
        self.size = _size(news)  # tokens and log probabilities in it

    def merge(self, newer: "Unread") -> "Unread":
        """Text, tokens and logprobs of both; the newer usage and end. An error replaces what was not read."""
        if isinstance(newer._news, RpcError) or isinstance(self._news, RpcError):
            return newer
        if isinstance(self._news, Delta):
            self._news = self._news.response
        if not self._texts:
            self._texts.append(self._news.text)
        self._texts.append(newer._news.text)
        self._news.MergeFrom(newer._news.response if isinstance(newer._news, Delta) else newer._news)
        self.size += newer.size
        return self

    def read(self) -> News:
        """What one message says for all of it."""
        if self._texts and isinstance(self._news, inference_pb2.GenerateResponse):
            self._news.text = "".join(self._texts)
            self._texts = []
        return self._news


ResponseBox = Outbox[int, Unread]


def new_response_box() -> ResponseBox:
    """By request number."""
    return Outbox(Unread.merge)


def _size(news: News) -> int:
    if isinstance(news, RpcError):
        return 0
    if isinstance(news, Delta) or not news.logprobs:
        return len(news.token_ids)
    # All tokens of a request come with the same number of alternatives.
    return len(news.token_ids) * (2 + len(news.logprobs[0].top_logprobs))


def unread_error() -> RpcError:
    return RpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the client has not read this request's output: more than {MAX_UNREAD} tokens wait. Read faster, or ask for "
        "fewer tokens or logprobs",
    )

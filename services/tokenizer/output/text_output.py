"""Outputs on their way to a client: merged while it does not read, and bounded."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError

# Tokens and log probabilities of one request that may wait unread. Far more than any reader in trouble needs; a
# request's whole output usually fits.
MAX_UNREAD = 32_768


@dataclass(slots=True)
class TextDelta:
    """More output of a request that goes on, and nothing else: what most outputs are, and cheaper than a message."""

    text: str
    token_ids: Sequence[int]
    usage: common_pb2.Usage  # of the request, up to now whenever it is read

    @property
    def response(self) -> inference_pb2.GenerateResponse:
        """The message that says it."""
        return inference_pb2.GenerateResponse(text=self.text, token_ids=self.token_ids, usage=self.usage)


TextOutput = inference_pb2.GenerateResponse | RpcError | TextDelta


class UnreadOutput:
    """Output of one request that its client has not read."""

    __slots__ = ("_output", "_prompt_size", "_reasonings", "_texts", "size")

    def __init__(self, output: TextOutput) -> None:
        self._output = output
        # Of merged responses, joined when they are read: a string that grows by a few characters each time is copied
        # as often.
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._prompt_size = _prompt_size(output)
        self.size = self._prompt_size + _size(output)  # tokens and log probabilities in it

    @property
    def is_last(self) -> bool:
        output = self._output
        return not isinstance(output, TextDelta) and (isinstance(output, RpcError) or bool(output.finish_reason))

    @property
    def is_too_much(self) -> bool:
        """Whether the client does not read, as more than MAX_UNREAD wait. What is told of its prompt comes at once."""
        return self.size - self._prompt_size > MAX_UNREAD and not self.is_last

    def merge(self, newer: "UnreadOutput") -> "UnreadOutput":
        """Text, tokens and all else of both; the newer usage and end. An error replaces what was not read."""
        if isinstance(newer._output, RpcError) or isinstance(self._output, RpcError):
            return newer
        if isinstance(self._output, TextDelta):
            self._output = self._output.response
        if not self._texts:
            self._texts.append(self._output.text)
            self._reasonings.append(self._output.reasoning)
        response = newer._output.response if isinstance(newer._output, TextDelta) else newer._output
        self._texts.append(response.text)
        self._reasonings.append(response.reasoning)
        self._output.MergeFrom(response)
        self.size += newer.size
        self._prompt_size += newer._prompt_size
        return self

    def read(self) -> TextOutput:
        """What one message says for all of it."""
        if self._texts and isinstance(self._output, inference_pb2.GenerateResponse):
            self._output.text = "".join(self._texts)
            self._output.reasoning = "".join(self._reasonings)
            self._texts, self._reasonings = [], []
        return self._output


def _size(output: TextOutput) -> int:
    if isinstance(output, RpcError):
        return 0
    if isinstance(output, TextDelta) or not output.logprobs:
        return len(output.token_ids)
    # All tokens of a request come with the same number of alternatives.
    return len(output.token_ids) * (2 + len(output.logprobs[0].top_logprobs))


def _prompt_size(output: TextOutput) -> int:
    if isinstance(output, inference_pb2.GenerateResponse) and output.HasField("prompt_logprobs"):
        return len(output.prompt_logprobs.tokens)
    return 0


def unread_error() -> RpcError:
    return RpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the client has not read this request's output: more than {MAX_UNREAD} tokens wait. Read faster, or ask for "
        "fewer tokens or logprobs",
    )

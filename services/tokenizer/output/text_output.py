"""Outputs for a client: their forms, their sizes, and their merging."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError

# Tokens and log probabilities of one request that may wait unread. The whole output of a request usually fits.
MAX_UNREAD = 32_768


@dataclass(slots=True)
class TextDelta:
    """More text of a request, and nothing else. Most outputs have this form, which is cheaper than a message."""

    text: str
    token_ids: Sequence[int]
    usage: common_pb2.Usage  # of the request, and updated with it

    @property
    def response(self) -> inference_pb2.GenerateResponse:
        """The same as a message."""
        return inference_pb2.GenerateResponse(text=self.text, token_ids=self.token_ids, usage=self.usage)


TextOutput = inference_pb2.GenerateResponse | RpcError | TextDelta


def is_last(output: TextOutput) -> bool:
    """Returns whether an output is the last one of its request."""
    return not isinstance(output, TextDelta) and (isinstance(output, RpcError) or bool(output.finish_reason))


def size_of(output: TextOutput) -> int:
    """Returns the number of tokens and log probabilities in an output, including those of the prompt."""
    if isinstance(output, RpcError):
        return 0
    if isinstance(output, TextDelta):
        return len(output.token_ids)
    num_of_prompt = len(output.prompt_logprobs.tokens) if output.HasField("prompt_logprobs") else 0
    # All tokens of a request come with the same number of alternatives.
    per_token = 2 + len(output.logprobs[0].top_logprobs) if output.logprobs else 1
    return num_of_prompt + len(output.token_ids) * per_token


def merged(outputs: Sequence[TextOutput]) -> TextOutput:
    """Merges several outputs of one request, the oldest first, with the newest usage and end. An error replaces unread
    outputs.

    May change the first output.
    """
    first, last = outputs[0], outputs[-1]
    if isinstance(last, RpcError):
        return last
    responses = [output for output in outputs if not isinstance(output, RpcError)]
    text = "".join([output.text for output in responses])
    deltas = [output for output in responses if isinstance(output, TextDelta)]
    if len(deltas) == len(outputs):
        return TextDelta(text, [token_id for delta in deltas for token_id in delta.token_ids], deltas[-1].usage)
    whole = first.response if isinstance(first, TextDelta) else responses[0]
    assert isinstance(whole, inference_pb2.GenerateResponse)
    reasoning = whole.reasoning
    for output in responses[1:]:
        if isinstance(output, TextDelta):
            whole.token_ids.extend(output.token_ids)
            whole.usage.CopyFrom(output.usage)
        else:
            reasoning += output.reasoning
            whole.MergeFrom(output)
    whole.text, whole.reasoning = text, reasoning  # MergeFrom() keeps only the last string
    return whole


def unread_error() -> RpcError:
    """Returns the error of a request that ends because its client does not read."""
    return RpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the client has not read this request's output: more than {MAX_UNREAD} tokens wait; read faster, or request "
        "fewer tokens or logprobs",
    )

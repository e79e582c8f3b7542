"""Outputs that become one."""

import grpc
import pytest

from pagewire.services.tokenizer.output import text_output
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire import rpc

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def test_merged_outputs_say_the_same() -> None:
    def response(text: str, token: int, **more) -> inference_pb2.GenerateResponse:
        usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=token)
        logprobs = [inference_pb2.TokenLogprob(token_id=token)]
        return inference_pb2.GenerateResponse(text=text, token_ids=[token], usage=usage, logprobs=logprobs, **more)

    outputs = [
        response("a", 1, prompt_token_ids=[9]),
        response("", 2),
        response("c", 3, finish_reason=STOP, stop_string="x"),
    ]
    merged = text_output.merged(outputs)
    assert text_output.merged([merged]) == merged
    assert (merged.text, list(merged.token_ids), list(merged.prompt_token_ids)) == ("ac", [1, 2, 3], [9])
    assert [token.token_id for token in merged.logprobs] == [1, 2, 3]
    assert (merged.usage.completion_tokens, merged.finish_reason, merged.stop_string) == (3, STOP, "x")
    failed = rpc.RpcError(grpc.StatusCode.INTERNAL, "x")
    assert text_output.merged([merged, failed]) is failed


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2), (0, 1), (0, 2)])
def test_merged_deltas_say_the_same(order: tuple[int, ...]) -> None:
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=len(order))
    first = inference_pb2.GenerateResponse(text="a", token_ids=[1], usage=usage, prompt_token_ids=[9])
    last = inference_pb2.GenerateResponse(text="c", token_ids=[3], usage=usage, finish_reason=STOP)
    outputs = [first, text_output.TextDelta("b", [2], usage), last]
    merged = text_output.merged([outputs[index] for index in order])
    assert text_output.size_of(merged) == len(order)
    assert (merged.text, list(merged.token_ids)) == ("".join("abc"[i] for i in order), [i + 1 for i in order])
    assert (merged.usage, merged.finish_reason) == (usage, STOP if 2 in order else 0)


def test_merged_deltas_stay_a_delta() -> None:
    usage = common_pb2.Usage(completion_tokens=2)
    deltas = [text_output.TextDelta("a", [1], usage), text_output.TextDelta("b", [2], usage)]
    assert text_output.merged(deltas) == text_output.TextDelta("ab", [1, 2], usage)

"""Outputs that no response has taken yet are kept as one, whatever their number."""

import gc
import sys

from pagewire.gateway.core.outputs import ChoiceDelta
from pagewire.gateway.core.reply import Reply
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenLogprob


def reply(num_choices: int = 1) -> Reply:
    return Reply(lambda choices: None, [GenerateRequest()] * num_choices, streaming=False)


async def test_a_reply_keeps_text_and_tokens_but_no_deltas() -> None:
    waiting = reply()
    for token_id in range(20_000):
        waiting.push(waiting.choices[0], ChoiceDelta("ab", [token_id]), 6)
    gc.collect()
    assert sum(isinstance(one, ChoiceDelta) for one in gc.get_objects()) < 10
    waiting.push(waiting.choices[0], GenerateResponse(text=".", token_ids=[7], finish_reason=1), 6)
    ((index, output),) = await waiting.whole()
    assert (index, output.text, output.finish_reason) == (0, "ab" * 20_000 + ".", 1)
    assert list(output.token_ids) == [*range(20_000), 7]
    assert sys.getsizeof(output.text) < 50_000


async def test_kinds_of_outputs_are_merged_in_order() -> None:
    waiting = reply(2)
    first, second = waiting.choices
    pushed = GenerateResponse(text="a", reasoning="r", token_ids=[1], logprobs=[TokenLogprob(token_id=1)])
    waiting.push(first, pushed, 1)
    waiting.push(second, ChoiceDelta("x", [9]), 1)
    waiting.push(first, ChoiceDelta("b", [2]), 1)
    last = GenerateResponse(text="c", reasoning="s", token_ids=[3], logprobs=[TokenLogprob(token_id=3)])
    last.finish_reason = 1
    waiting.push(first, last, 1)
    waiting.push(second, GenerateResponse(finish_reason=2), 1)
    one, two = (output for _, output in await waiting.whole())
    assert (one.text, one.reasoning, list(one.token_ids), one.finish_reason) == ("abc", "rs", [1, 2, 3], 1)
    assert [logprob.token_id for logprob in one.logprobs] == [1, 3]
    assert (two.text, list(two.token_ids), two.finish_reason) == ("x", [9], 2)
    assert pushed.text == "a" and list(pushed.token_ids) == [1], "what was pushed is not changed"

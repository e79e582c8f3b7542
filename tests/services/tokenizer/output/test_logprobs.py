"""Log probabilities as text: the places of tokens, and the log probabilities of prompts."""

from pathlib import Path

import pytest

from pagewire.services.tokenizer.output import text_output
from pagewire.services.tokenizer.output.detokenizer import Detokenizers
from pagewire.services.tokenizer.output.prompt_logprobs import prompt_logprobs
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.streams import Outbox
from tests.fakes import fake_prompt_logprobs
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine


@pytest.fixture
def make_line(tmp_path: Path, smollm2_gguf: Path, smollm2):
    def make(text: str = "Hello", **scheduler) -> TokenizerLine:
        output = [*smollm2.encode(text, add_special_tokens=False), EOS]
        return TokenizerLine(tmp_path, FakeScheduler(lambda request: output, **scheduler), smollm2_gguf)

    return make


async def test_logprobs_say_where_their_tokens_are(make_line, pool) -> None:
    """Tokens that make up one character are where it begins; special tokens have no place in the text."""
    async with make_line("ab 🧑🏽 c d END e", tokens_per_step=2).running(pool=pool) as line:
        params = common_pb2.SamplingParams(logprobs=0)
        result = await line.generate(text="x", sampling_params=params, stop=["END"], include_stop_str_in_output=True)
        ended = await line.generate(text="x", sampling_params=params)
    assert result.text == "ab 🧑🏽 c d END"
    offsets = [token.text_offset for token in result.logprobs]
    ends = [*offsets[1:], len(result.text)]
    pieces = [result.text[start:end] for start, end in zip(offsets, ends, strict=True)]
    assert "".join(pieces) == result.text
    for piece, token in zip(pieces, result.logprobs, strict=True):
        assert piece in (token.token, "") or "\ufffd" in token.token
    assert offsets.count(3) > 1, "the emoji are several tokens"
    assert ended.logprobs[-1].token == "<|im_end|>" and ended.logprobs[-1].text_offset == len(ended.text)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"text": "Say 🧑 twice"}, "Say 🧑 twice"),
        ({"text": "<|im_start|>user\nhi"}, "<|im_start|>user\nhi"),
        ({"token_ids": {"ids": [1, 504, 505]}}, None),
        ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, None),
        ({"text": "Say it twice", "truncate_prompt_tokens": 2}, " it twice"),
    ],
    ids=["text", "special tokens", "token ids", "chat", "truncated"],
)
async def test_prompt_logprobs_come_once_as_text(make_line, pool, prompt, text) -> None:
    async with make_line().running(pool=pool) as line:
        params = common_pb2.SamplingParams(prompt_logprobs=1, max_tokens=4)
        result = await line.generate(sampling_params=params, **prompt)
        first, *others = result.responses
        decoded = await line.stub.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=result.prompt_token_ids, skip_special_tokens=True)
        )
        resumed = await line.generate(
            token_ids={"ids": result.prompt_token_ids}, resume_token_ids=result.token_ids[:1], sampling_params=params
        )
    assert not any(response.HasField("prompt_logprobs") for response in (*others, *resumed.responses))
    reported, prompt_ids = first.prompt_logprobs, result.prompt_token_ids
    assert reported.logprobs == fake_prompt_logprobs(prompt_ids, 1, 49_152)
    assert reported.text == (decoded.text if text is None else text)
    own = [reported.first_token, *reported.tokens[::2]]
    assert len(own) == len(reported.text_offsets) == len(prompt_ids)
    assert len(reported.tokens) == 2 * (len(prompt_ids) - 1)
    ends = [*reported.text_offsets[1:], len(reported.text)]
    pieces = [reported.text[start:end] for start, end in zip(reported.text_offsets, ends, strict=True)]
    assert "".join(pieces) == reported.text
    for piece, token in zip(pieces, own, strict=True):
        assert piece in (token, "") or "\ufffd" in token


def test_what_was_added_before_a_prompts_text_has_no_place_in_it(pool) -> None:
    codec = pool.codec.tokenizer.backend
    token_ids = [1, *codec.encode("a b", add_special_tokens=False).ids]
    columns = fake_prompt_logprobs(token_ids, 0, 49_152)
    reported = prompt_logprobs(Detokenizers(pool.codec.tokenizer), columns, token_ids, "a b", skip_special_tokens=True)
    assert (reported.text, reported.first_token, list(reported.text_offsets)) == ("a b", "<|im_start|>", [0, 0, 1])


def test_logprobs_of_a_prompt_do_not_count_as_unread() -> None:
    prompt = inference_pb2.PromptLogprobs(tokens=["x"] * (text_output.MAX_UNREAD + 1))
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=1)
    first = inference_pb2.GenerateResponse(text="a", token_ids=[1], usage=usage, prompt_logprobs=prompt)
    outbox = Outbox(text_output.merged, text_output.size_of)
    assert text_output.size_of(first) == text_output.MAX_UNREAD + 2, "it is a large message"
    assert outbox.put(1, first) == 0
    assert outbox.put(1, text_output.TextDelta("b", [2], usage)) == 1, "the prompt does not count"

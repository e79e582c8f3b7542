"""Calls of the public API: generation, tokens, and lists of models."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest

from pagewire.v1 import common_pb2, inference_pb2
from tests.services.tokenizer.service.answers import TEXT, code_of
from tests.services.tokenizer.service_line import EOS

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_generate(make_line, pool, tokens, tokens_per_step) -> None:
    async with make_line(tokens_per_step=tokens_per_step).running(pool=pool) as line:
        result = await line.generate(text="Say", sampling_params=common_pb2.SamplingParams(max_tokens=200))
    assert result.text == TEXT
    assert result.token_ids == [*tokens(TEXT), EOS]
    assert result.prompt_token_ids == tokens("Say")
    assert result.finish_reason == STOP
    assert result.usage == common_pb2.Usage(
        prompt_tokens=len(tokens("Say")), completion_tokens=len(result.token_ids), cached_tokens=16
    )
    assert not any("\ufffd" in response.text for response in result.responses)


async def test_length_finish_flushes_incomplete_characters(make_line, pool) -> None:
    async with make_line("🧑", eos=False).running(pool=pool) as line:
        result = await line.generate(text="Say", sampling_params=common_pb2.SamplingParams(max_tokens=1))
    assert (result.text, result.finish_reason) == ("\ufffd", LENGTH)


async def test_what_the_scheduler_receives(make_line, pool, tokens) -> None:
    """Lengths as they were asked: the executor may just have been replaced by one that takes more."""
    async with make_line(max_model_len=100).running(pool=pool) as line:
        await line.generate(text="Say", request_id="mine", cache_salt="secret")
        params = common_pb2.SamplingParams(max_tokens=5000, seed=7, temperature=0.5)
        await line.generate(text="Say", sampling_params=params)
        await line.generate(text="word " * 150)
        first, second, third = line.scheduler.requests
    assert list(first.prompt_token_ids) == tokens("Say")
    assert (first.external_id, first.cache_salt) == ("mine", "secret")
    assert first.sampling_params.HasField("seed")
    assert not first.sampling_params.HasField("max_tokens")
    assert (second.sampling_params.seed, second.sampling_params.max_tokens) == (7, 5000)
    assert list(third.prompt_token_ids) == tokens("word " * 150)
    assert second.sampling_params.temperature == 0.5
    assert len({submission.request_id for submission in line.scheduler.submissions}) == 3


async def test_bad_words_become_tokens_as_they_begin_and_as_they_follow(make_line, pool, tokens) -> None:
    given = common_pb2.SamplingParams(bad_words=[common_pb2.TokenSequence(token_ids=[7])])
    async with make_line().running(pool=pool) as line:
        await line.generate(text="Say", bad_words=["world", " end", "\n", "world"], sampling_params=given)
    [request] = line.scheduler.requests
    reported = [list(word.token_ids) for word in request.sampling_params.bad_words]
    assert reported == [[7], *map(tokens, ("world", " world", "end", " end", "\n", " \n"))]


@pytest.mark.parametrize(
    ("limit", "more", "kept"),
    [
        (3, {}, slice(-3, None)),
        (3, {"truncate_end": True}, slice(3)),
        (20, {}, slice(None)),
        (-1, {}, slice(-19, None)),
        (-1, {"sampling_params": {"max_tokens": 15}}, slice(-5, None)),
    ],
)
async def test_prompts_are_cut_where_it_is_asked(make_line, pool, tokens, limit, more, kept) -> None:
    prompt = tokens("One two three four five six seven eight nine ten " * 2)[:20]
    async with make_line(max_model_len=20).running(pool=pool) as line:
        await line.scheduler.until(lambda: line.link.is_available)  # before that, the limits of the model are not known
        result = await line.generate(token_ids={"ids": prompt}, truncate_prompt_tokens=limit, **more)
        # A gateway that submits again sends the prompt's tokens as it received them.
        resume = {"token_ids": {"ids": result.prompt_token_ids}, "resume_token_ids": result.token_ids[:1]}
        await line.generate(**resume, truncate_prompt_tokens=limit, **more)
        await line.generate(text="Say", truncate_prompt_tokens=limit, **more)
    first, resumed, short = line.scheduler.requests
    assert list(first.prompt_token_ids) == list(resumed.prompt_token_ids) == result.prompt_token_ids == prompt[kept]
    assert list(short.prompt_token_ids) == tokens("Say")


async def test_chat_is_rendered(make_line, pool, tokens) -> None:
    chat = inference_pb2.ChatPrompt(
        messages=[
            inference_pb2.ChatMessage(role="system", content="Be brief"),
            inference_pb2.ChatMessage(role="user", parts=[{"text": "one"}, {"text": "two"}]),
        ]
    )
    expected = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n<|im_start|>assistant\n"
    async with make_line().running(pool=pool) as line:
        result = await line.generate(chat=chat)
        tokenized = await line.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat, return_token_strs=True))
    assert result.prompt_token_ids == list(tokenized.token_ids) == tokens(expected)
    assert list(tokenized.token_strs[:3]) == ["<|im_start|>", "system", "Ċ"]
    assert tokenized.max_model_len == 1000


async def test_special_tokens_are_shown_on_request_but_never_the_one_that_ends_it(make_line, pool) -> None:
    text = "a<|im_start|>b"
    async with make_line(text).running(pool=pool) as line:
        assert (await line.generate(text="x")).text == "ab"
        assert (await line.generate(text="x", skip_special_tokens=False)).text == text
        shown = await line.generate(text="x", skip_special_tokens=False, include_stop_str_in_output=True)
        assert shown.text == text + "<|im_end|>"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
async def test_stop_string_ends_here_and_upstream(make_line, pool, tokens, include, tokens_per_step) -> None:
    line = make_line(TEXT + " and on" * 450, tokens_per_step=tokens_per_step, auto=False)
    async with line.running(pool=pool):
        task = asyncio.create_task(line.generate(text="x", stop=["never", " END"], include_stop_str_in_output=include))
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        while not task.done():
            line.scheduler.step()
            await asyncio.sleep(0.01)
        result = task.result()
        await line.scheduler.until(lambda: line.scheduler.aborted == [line.scheduler.submissions[0].request_id])
        assert line.link.num_live == 0
    assert result.text == TEXT[: TEXT.index(" END")] + " END" * include
    assert (result.finish_reason, result.stop_string) == (STOP, " END")
    assert result.token_ids == tokens(TEXT)[: len(result.token_ids)]
    # All tokens up to and including the one that completes the stop string, and no more.
    completed = line.pool.codec.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    before = line.pool.codec.tokenizer.decode(result.token_ids[:-1], skip_special_tokens=True)
    assert " END" in completed and " END" not in before
    assert result.usage.completion_tokens == len(result.token_ids)


async def test_min_tokens_holds_stop_strings_off(make_line, pool) -> None:
    async with make_line("a b a b a b").running(pool=pool) as line:
        params = common_pb2.SamplingParams(min_tokens=3)
        result = await line.generate(text="x", stop=["b"], sampling_params=params)
    assert (result.text, result.stop_string) == ("a b a ", "b")


async def test_logprobs(make_line, pool, tokens) -> None:
    async with make_line("🧑 x", tokens_per_step=2).running(pool=pool) as line:
        result = await line.generate(text="x", sampling_params=common_pb2.SamplingParams(logprobs=2))
    assert [token.token_id for token in result.logprobs] == result.token_ids
    assert b"".join(token.token_bytes for token in result.logprobs) == "🧑 x<|im_end|>".encode()
    first = result.logprobs[0]
    assert (first.logprob, first.token) == (-0.5, first.token_bytes.decode("utf-8", "replace"))
    assert [top.token_id for top in first.top_logprobs] == [first.token_id + 1, first.token_id + 2]
    assert [top.logprob for top in first.top_logprobs] == [-1.5, -2.5]


async def test_models(make_line, pool) -> None:
    line = make_line(config={"served_model_name": "one, two three"})
    async with line.running(pool=pool):
        await line.generate(text="x", model="two")
        code, details = await code_of(line.generate(text="x", model="four"))
        models = (await line.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert code == grpc.StatusCode.NOT_FOUND
    assert "'four'" in details and "one, two, three" in details
    assert [model.id for model in models] == ["one", "two", "three"]
    assert (models[0].max_model_len, models[0].has_chat_template) == (1000, True)
    assert models[0].root == Path(line.config.model).stem


async def test_tokenize_and_detokenize(make_line, pool, tokens) -> None:
    async with make_line().running(pool=pool) as line:
        text = "a<|im_end|>👍"
        tokenized = await line.stub.Tokenize(inference_pb2.TokenizeRequest(text=text))
        assert list(tokenized.token_ids) == tokens(text)
        assert list(tokenized.token_strs) == []
        for skip, expected in ((False, text), (True, "a👍")):
            request = inference_pb2.DetokenizeRequest(token_ids=tokens(text), skip_special_tokens=skip)
            assert (await line.stub.Detokenize(request)).text == expected
        code, _ = await code_of(line.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[-1])))
        assert code == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"beam_search": {}, "sampling_params": {"max_tokens": 3}}])
async def test_the_first_response_names_the_request(make_line, pool, fields) -> None:
    async with make_line().running(pool=pool) as line:
        await line.scheduler.until(lambda: line.link.is_available)
        call = line.stub.Generate(inference_pb2.GenerateRequest(text="Say", request_id="mine", **fields))
        first, *others = [response async for response in call]
    assert first.request_id == "mine"
    assert {response.request_id for response in others} <= {""}


async def test_models_are_listed_in_pages(make_line, pool) -> None:
    async with make_line(config={"served_model_name": "a,b,c"}).running(pool=pool) as line:
        whole = await line.stub.ListModels(inference_pb2.ListModelsRequest())
        first = await line.stub.ListModels(inference_pb2.ListModelsRequest(page_size=2))
        rest = await line.stub.ListModels(
            inference_pb2.ListModelsRequest(page_size=2, page_token=first.next_page_token)
        )
        for wrong in ({"page_size": -1}, {"page_token": "d"}):
            code, message = await code_of(line.stub.ListModels(inference_pb2.ListModelsRequest(**wrong)))
            assert code == grpc.StatusCode.INVALID_ARGUMENT and next(iter(wrong)) in message
    assert [[model.id for model in page.models] for page in (whole, first, rest)] == [
        ["a", "b", "c"],
        ["a", "b"],
        ["c"],
    ]
    assert not whole.next_page_token and not rest.next_page_token
    assert abs(whole.models[0].create_time.seconds - time.time()) < 60


async def test_a_seed_of_the_server_makes_calls_without_one_reproducible(make_line, pool) -> None:
    async with make_line(config={"seed": 42}).running(pool=pool) as line:
        for text in ("Say", "Tell", "Say"):
            await line.generate(text=text)
        first, other, again = (request.sampling_params.seed for request in line.scheduler.requests)
    assert first == again != other

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status import rpc_status
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY, CollectorRegistry, Histogram

from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.generation import text_generator
from pagewire.services.tokenizer.output import text_output
from pagewire.services.tokenizer.pool.codec import CodecSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.prompts import encoder
from pagewire.services.tokenizer.received import Received
from pagewire.telemetry import spans as telemetry
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from pagewire.v1.inference_link_pb2_grpc import InferenceLinkServiceStub
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from pagewire.wire import rpc
from tests.services.tokenizer.service_line import EOS, Collected, FakeScheduler, Gateway, TokenizerLine

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
TEXT = "Hello 👍🏽 world, the end.\nAnd 北京 more END of it"


@pytest.fixture(scope="module")
def pool(smollm2_gguf: Path):
    pool = TokenizerPool(CodecSource(str(smollm2_gguf)), size=2)
    yield pool
    pool.close()


@pytest.fixture
def tokens(smollm2):
    return lambda text: smollm2.encode(text, add_special_tokens=False)


@pytest.fixture
def make_line(tmp_path: Path, smollm2_gguf: Path, tokens):
    def make(text: str = TEXT, *, config: dict | None = None, eos: bool = True, **scheduler) -> TokenizerLine:
        output = tokens(text) + [EOS] * eos
        fake = FakeScheduler(scheduler.pop("script", lambda request: output), **scheduler)
        return TokenizerLine(tmp_path, fake, smollm2_gguf, **(config or {}))

    return make


@pytest.fixture
def spans(monkeypatch) -> InMemorySpanExporter:
    """The spans that ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    return exporter


async def code_of(awaitable) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code(), caught.value.details()


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
    told = [list(word.token_ids) for word in request.sampling_params.bad_words]
    assert told == [[7], *map(tokens, ("world", " world", "end", " end", "\n", " \n"))]


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
        # A gateway that submits again sends what it was told the prompt is.
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


@pytest.mark.parametrize("num_resumed", [1, 4, 7])
async def test_resume_goes_on_with_text_after_the_given_tokens(make_line, pool, tokens, num_resumed) -> None:
    async with make_line().running(pool=pool) as line:
        whole = await line.generate(text="Say", stop=["END"])
        first = whole.responses[:num_resumed]  # of a token each, or of several that were merged
        given = [token_id for response in first for token_id in response.token_ids]
        before = "".join(response.text for response in first)
        prompt = inference_pb2.TokenIds(ids=whole.prompt_token_ids)
        resumed = await line.generate(token_ids=prompt, resume_token_ids=given, stop=["END"])
    assert before + resumed.text == whole.text
    assert given + resumed.token_ids == whole.token_ids
    assert resumed.usage.completion_tokens == whole.usage.completion_tokens
    assert list(line.scheduler.submissions[1].resume_token_ids) == given
    assert not line.scheduler.submissions[1].resubmitted


async def test_a_gateways_resubmission_is_passed_on(make_line, pool) -> None:
    async with make_line().running(pool=pool) as line:
        await line.generate(text="Say", resubmitted=True)
    assert line.scheduler.submissions[0].resubmitted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "x", "resume_token_ids": [1]}, "needs the prompt as token_ids"),
        ({"token_ids": {"ids": [1]}, "resume_token_ids": [5, -1]}, "resume_token_ids contains -1"),
    ],
)
async def test_impossible_resumptions_are_refused(make_line, pool, fields, message) -> None:
    async with make_line().running(pool=pool) as line:
        with pytest.raises(rpc.RpcError, match=message) as raised:
            await line.generate(**fields)
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_a_gateway_says_of_a_request_is_passed_on(make_line, pool) -> None:
    context = RequestContext(tenant="somebody", tenant_weight=2, timeout={"seconds": 30}, traceparent="00-x")
    async with make_line().running(pool=pool) as line:
        gateway = Gateway(line)
        await gateway.send({1: GenerateSubmission(request={"text": "Say"}, context=context)})
        await gateway.read_until_finished(1)
    told = line.scheduler.submissions[0].context
    assert 20 < told.timeout.ToMilliseconds() / 1000 < 30, "what is left of it"
    told.ClearField("timeout")
    context.ClearField("timeout")
    assert told == context


async def test_resume_that_already_met_a_stop_string_ends_at_once(make_line, pool, tokens) -> None:
    async with make_line().running(pool=pool) as line:
        whole = await line.generate(text="Say", stop=["END"])
        prompt = inference_pb2.TokenIds(ids=whole.prompt_token_ids)
        again = await line.generate(token_ids=prompt, resume_token_ids=whole.token_ids, stop=["END"])
        assert len(line.scheduler.requests) == 1
    assert (again.text, again.token_ids, again.finish_reason) == ("", [], STOP)
    assert (again.stop_string, again.usage.completion_tokens) == ("END", len(whole.token_ids))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no prompt"),
        ({"text": ""}, "the prompt is empty"),
        ({"text": "x", "truncate_prompt_tokens": 0}, r"truncate_prompt_tokens is 0; it must be -1 or within 1\.\.50"),
        ({"text": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
        ({"text": "x", "truncate_prompt_tokens": 51}, "truncate_prompt_tokens is 51"),
        (
            {"text": "x", "truncate_prompt_tokens": -1, "sampling_params": {"max_tokens": 50}},
            "max_tokens is 50 and the model takes 50 tokens",
        ),
        ({"token_ids": {"ids": [1] * 2_000_001}}, "the prompt has 2000001 tokens; at most 2000000"),
        ({"token_ids": {"ids": [1, -2]}}, "token_ids.ids contains -2"),
        ({"text": "x", "stop": ["a", ""]}, "empty string"),
        ({"text": "x", "bad_words": ["a", ""]}, "bad_words contains an empty string"),
        ({"text": "x", "bad_words": ["a"] * 1025}, "bad_words has 1025 words; at most 1024"),
        ({"text": "x", "stop": ["a"] * 1025}, "stop has 1025 strings; at most 1024"),
        (
            {"chat": {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ '%99d' % 1 }}"}},
            "--trust-request-chat-template",
        ),
        (
            {
                "chat": {
                    "messages": [{"role": "user", "content": "x"}],
                    "chat_template_kwargs_json": '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
                }
            },
            "chat_template_kwargs is not valid JSON: maximum recursion depth",
        ),
        ({"chat": inference_pb2.ChatPrompt()}, "at least one message"),
        (
            {
                "chat": inference_pb2.ChatPrompt(
                    messages=[inference_pb2.ChatMessage(role="user", content="x")], chat_template_kwargs_json="[1]"
                )
            },
            "JSON object",
        ),
    ],
)
async def test_bad_requests_say_what_is_wrong(make_line, pool, fields, message) -> None:
    async with make_line(max_model_len=50).running(pool=pool) as line:
        await line.scheduler.until(lambda: line.link.is_available)
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await line.generate(**fields)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert line.scheduler.requests == []


@pytest.mark.parametrize(
    ("template", "message"), [("{% bad %}", "not valid jinja"), (r"{{ '\ud800' }}", "surrogates not allowed")]
)
async def test_a_trusted_clients_template_may_still_be_wrong(make_line, smollm2_gguf, template, message) -> None:
    async with make_line(config={"trust_request_chat_template": True}).running() as line:
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await line.generate(chat={"messages": [{"role": "user", "content": "x"}], "chat_template": template})
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


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
    assert models[0].root == line.config.model


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


async def test_errors_of_the_scheduler_are_passed_on(make_line, pool) -> None:
    full = common_pb2.RequestError(code=8, message="the queue is full")
    async with make_line(errors={0: full}).running(pool=pool) as line:
        assert await code_of(line.generate(text="x")) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        assert (await line.generate(text="x")).text == TEXT


async def test_connect_carries_many_requests(make_line, pool, tokens) -> None:
    def script(request) -> list[int]:
        return [*tokens(f"answer {len(request.prompt_token_ids)}"), EOS]

    async with make_line(script=script, errors={1: common_pb2.RequestError(code=8, message="full")}).running(
        pool=pool
    ) as line:
        gateway = Gateway(line)
        await gateway.send({7: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 3))})
        await gateway.read_until_finished(7)
        await gateway.send({8: inference_pb2.GenerateRequest(text="x")})
        await gateway.read_until_finished(8)
        await gateway.send(
            {n: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * n)) for n in range(10, 40)}
            | {50: inference_pb2.GenerateRequest(text="")}
        )
        await gateway.read_until_finished(*range(10, 40), 50)
        await gateway.call.done_writing()
        assert await gateway.call.read() is grpc.aio.EOF
    assert gateway.requests[7].text == "answer 3"
    assert (gateway.requests[8].error.code, gateway.requests[8].error.message) == (8, "full")
    for n in range(10, 40):
        assert gateway.requests[n].text == f"answer {n}"
    assert gateway.requests[50].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_outputs_in_columns_say_the_same(make_line, pool) -> None:
    """Covers requests with and without logprobs; first and last outputs are messages of their own."""
    async with make_line().running(pool=pool) as line:
        gateway = Gateway(line)
        requests = {
            n: inference_pb2.GenerateRequest(
                text="x", stop=["END"] if n % 2 else [], sampling_params=common_pb2.SamplingParams(logprobs=logprobs)
            )
            for n, logprobs in enumerate([None, None, 1])
        }
        await gateway.send(requests)
        await gateway.read_until_finished(*requests)
        alone = []
        for request in requests.values():
            alone.append(Collected())
            async for response in line.stub.Generate(request):
                alone[-1].add(response)
    assert gateway.num_in_columns > 0
    for request, expected in zip(gateway.requests.values(), alone, strict=True):
        assert (request.text, request.token_ids, request.usage) == (expected.text, expected.token_ids, expected.usage)
        assert (request.logprobs, request.stop_string) == (expected.logprobs, expected.stop_string)
        assert request.prompt_token_ids == expected.prompt_token_ids


async def test_half_closed_stream_still_gets_its_answers(make_line, pool) -> None:
    async with make_line().running(pool=pool) as line:
        gateway = Gateway(line)
        await gateway.send({1: inference_pb2.GenerateRequest(text="x")})
        await gateway.call.done_writing()
        await gateway.read_until_finished(1)
        assert await gateway.call.read() is grpc.aio.EOF
    assert gateway.requests[1].text == TEXT


async def test_gateway_abort_reaches_the_scheduler_and_is_not_answered(make_line, pool) -> None:
    line = make_line(auto=False)
    async with line.running(pool=pool):
        gateway = Gateway(line)
        await gateway.send({n: inference_pb2.GenerateRequest(text="x", request_id=str(n)) for n in (1, 2)})
        await line.scheduler.until(lambda: line.scheduler.num_running == 2)
        first = next(one for one in line.scheduler.submissions if one.request.external_id == "1")
        await gateway.send(aborts=[1, 99])
        await line.scheduler.until(lambda: line.scheduler.aborted == [first.request_id])
        line.scheduler.auto = True
        line.scheduler.step()
        await gateway.read_until_finished(2)
    assert gateway.requests[1].responses == []
    assert gateway.requests[2].text == TEXT


async def test_a_vanished_gateway_ends_all_its_requests(make_line, pool) -> None:
    line = make_line(auto=False)
    async with line.running(pool=pool):
        gateway, other = Gateway(line), Gateway(line)
        await gateway.send({n: inference_pb2.GenerateRequest(text="x") for n in range(5)})
        await other.send({1: inference_pb2.GenerateRequest(text="x")})
        await line.scheduler.until(lambda: line.scheduler.num_running == 6)
        gateway.call.cancel()
        await line.scheduler.until(lambda: len(line.scheduler.aborted) == 5)
        assert line.link.num_live == 1


async def test_a_cancelled_call_is_aborted(make_line, pool) -> None:
    line = make_line(auto=False)
    async with line.running(pool=pool):
        call = line.stub.Generate(inference_pb2.GenerateRequest(text="x"))
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        line.scheduler.step()
        assert (await call.read()).token_ids
        call.cancel()
        await line.scheduler.until(lambda: line.scheduler.aborted != [])
        assert line.link.num_live == 0


async def test_a_number_in_use_is_an_error_of_the_stream(make_line, pool) -> None:
    async with make_line(auto=False).running(pool=pool) as line:
        gateway = Gateway(line)
        await gateway.send({1: inference_pb2.GenerateRequest(text="x")})
        await gateway.send({1: inference_pb2.GenerateRequest(text="x")})
        code, details = await code_of(gateway.read())
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "number 1" in details


async def test_the_port_for_clients_has_no_link(make_line, pool, tmp_path) -> None:
    address = f"unix:{tmp_path}/public.sock"
    async with make_line(config={"public_listen": address}).running(pool=pool), rpc.channel(address) as channel:
        stub = InferenceServiceStub(channel)
        texts = [response.text async for response in stub.Generate(inference_pb2.GenerateRequest(text="Say"))]
        code, _ = await code_of(InferenceLinkServiceStub(channel).Connect(iter([])).read())
    assert "".join(texts) == TEXT
    assert code == grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_message_end_the_stream(make_line, pool) -> None:
    async with make_line().running(pool=pool) as line:
        call = line.channel.stream_stream("/pagewire.v1.InferenceLinkService/Connect")()
        assert await call.read() == b""
        await call.write(b"\xff\xff\xff")
        code, _ = await code_of(asyncio.wait_for(call.read(), 30))
        assert code == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("stop", [[], ["END"]])
async def test_nothing_is_lost_when_the_scheduler_dies(make_line, pool, tokens, stop) -> None:
    """Killed again and again in mid-stream; every client gets every token once."""
    before = REGISTRY.get_sample_value("pagewire:tokenizer_resubmissions_total")
    line = make_line(auto=False)
    async with line.running(pool=pool):
        undisturbed = TEXT[: TEXT.index("END")] if stop else TEXT
        gateway = Gateway(line)
        params = common_pb2.SamplingParams(temperature=1.0)
        await gateway.send(
            {n: inference_pb2.GenerateRequest(text="x", stop=stop, sampling_params=params) for n in range(3)}
        )
        unary = asyncio.create_task(line.generate(text="x", stop=stop, sampling_params=params))
        for expected in (4, 8, 12):
            await line.scheduler.until(lambda expected=expected: len(line.scheduler.requests) == expected)
            for _ in range(3):
                line.scheduler.step()
            await line.scheduler.until(lambda: all(queue_is_read(line)))
            await line.kill_scheduler()
            await line.start_scheduler()
        await line.scheduler.until(lambda: line.scheduler.num_running == 4)
        line.scheduler.auto = True
        line.scheduler.step()
        await gateway.read_until_finished(0, 1, 2)
        results = [*gateway.requests.values(), await unary]
    requests, submissions = line.scheduler.requests, line.scheduler.submissions
    assert len({request.sampling_params.seed for request in requests[:4]}) == 4
    assert {request.sampling_params.seed for request in requests} == {r.sampling_params.seed for r in requests[:4]}
    assert any(submission.resume_token_ids for submission in submissions)
    # What was sent before is not turned away, and is counted once however long it took to connect again.
    assert [submission.resubmitted for submission in submissions] == [False] * 4 + [True] * 12
    assert REGISTRY.get_sample_value("pagewire:tokenizer_resubmissions_total") - before == 12
    for result in results:
        assert result.text == undisturbed
        assert result.token_ids == [*tokens(TEXT), EOS][: len(result.token_ids)]
        assert result.usage.completion_tokens == len(result.token_ids)
        assert result.usage.cached_tokens == 16  # the first attempt's


def queue_is_read(line: TokenizerLine) -> list[bool]:
    return [running.stream.empty() for running in line.scheduler._running.values()]


async def test_requests_wait_for_a_scheduler_then_fail(make_line, pool) -> None:
    line = make_line(config={"recovery_timeout": 0.3})
    async with line.running(pool=pool, with_scheduler=False):
        code, details = await code_of(line.generate(text="x"))
        assert code == grpc.StatusCode.UNAVAILABLE
        assert "--recovery-timeout" in details
        await line.start_scheduler()
        await line.scheduler.until(lambda: line.link.is_available)
        assert (await line.generate(text="x")).text == TEXT
        line.scheduler.auto = False
        task = asyncio.create_task(line.generate(text="x"))
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        await line.kill_scheduler()
        assert (await code_of(task))[0] == grpc.StatusCode.UNAVAILABLE
        assert line.link.num_live == 0


async def test_requests_that_came_before_the_scheduler_are_served(make_line, pool) -> None:
    line = make_line()
    async with line.running(pool=pool, with_scheduler=False):
        assert (await line.stub.Tokenize(inference_pb2.TokenizeRequest(text="x"))).max_model_len == 0
        task = asyncio.create_task(line.generate(text="x"))
        await asyncio.sleep(0.05)
        await line.start_scheduler()
        assert (await task).text == TEXT
        # The same once the model is known and the scheduler is away; none of them was let in before.
        await line.kill_scheduler()
        task = asyncio.create_task(line.generate(text="x"))
        await asyncio.sleep(0.2)
        await line.start_scheduler()
        assert (await task).text == TEXT
    assert [submission.resubmitted for submission in line.scheduler.submissions] == [False, False]


async def test_a_long_prompt_does_not_hold_up_tokens_of_others(make_line, tokens, smollm2_gguf) -> None:
    """A worker is busy with 400,000 characters; meanwhile another request goes on."""
    pool = TokenizerPool(CodecSource(str(smollm2_gguf)), size=1)
    line = make_line(auto=False, max_model_len=10**6)
    order: list[str] = []
    try:
        async with line.running(pool=pool):
            short = line.stub.Generate(inference_pb2.GenerateRequest(text="x"))
            await line.scheduler.until(lambda: line.scheduler.num_running == 1)
            tokenize = line.stub.Tokenize(inference_pb2.TokenizeRequest(text="Lorem ipsum dolor " * 22_000))

            async def wait_long() -> None:
                await tokenize
                order.append("long prompt encoded")

            long = asyncio.create_task(wait_long())
            for index in range(20):
                line.scheduler.step()
                await short.read()
                order.append(f"token {index}")
            await long
    finally:
        pool.close()
    # Were the event loop, or the interpreter lock, held while encoding, not one token would have come through.
    assert order.index("long prompt encoded") >= 5, order


async def test_choices_of_one_prompt_encode_it_once(make_line, pool, tokens, monkeypatch) -> None:
    encode_text, prompts = pool.encode_text, []
    say = 100 * "Say "
    may_encode = asyncio.Event()

    async def counted(text: str, **kwargs) -> list[int]:
        prompts.append(text)
        await may_encode.wait()
        return await encode_text(text, **kwargs)

    monkeypatch.setattr(pool, "encode_text", counted)
    async with make_line().running(pool=pool) as line:
        gateway = Gateway(line)
        texts = {1: say, 2: say, 3: say, 4: 100 * "other "}
        await gateway.send({n: inference_pb2.GenerateRequest(text=text) for n, text in texts.items()})
        await line.scheduler.until(lambda: len(prompts) == 2)
        # A client that leaves takes nothing from the others.
        await gateway.send(aborts=[1])
        await gateway.send({5: inference_pb2.GenerateRequest(text=1000 * "y")})
        await line.scheduler.until(lambda: len(prompts) == 3)
        may_encode.set()
        await gateway.read_until_finished(2, 3, 4, 5)
        assert prompts == [say, 100 * "other ", 1000 * "y"]
        assert (await line.generate(text=say)).text == TEXT
    assert prompts == [say, 100 * "other ", 1000 * "y", say]
    assert [gateway.requests[n].prompt_token_ids for n in (2, 3)] == [tokens(say)] * 2
    assert gateway.requests[1].responses == []


async def test_many_short_prompts_at_once_leave_the_event_loop_to_others(make_line, pool, monkeypatch) -> None:
    """A few are encoded at once, the rest by the pool, one after the other if they are alike; all are answered."""
    at_once, by_pool = [], []
    encode_at_once, encode_text = pool.encode_at_once, pool.encode_text

    def counted_at_once(text: str, *, add_special_tokens: bool) -> list[int]:
        at_once.append(text)
        return encode_at_once(text, add_special_tokens=add_special_tokens)

    async def counted(text: str, **kwargs) -> list[int]:
        by_pool.append(text)
        return await encode_text(text, **kwargs)

    monkeypatch.setattr(pool, "encode_at_once", counted_at_once)
    monkeypatch.setattr(pool, "encode_text", counted)
    async with make_line().running(pool=pool) as line:
        gateway = Gateway(line)
        await gateway.send({n: inference_pb2.GenerateRequest(text="Say") for n in range(60)})
        await gateway.read_until_finished(*range(60))
        assert (len(at_once), by_pool) == (encoder.MOST_AT_ONCE, ["Say"])
        assert (await line.generate(text="Say")).text == TEXT
        assert len(at_once) == encoder.MOST_AT_ONCE + 1, "the next turn"
    assert {request.text for request in gateway.requests.values()} == {TEXT}
    assert len({tuple(request.prompt_token_ids) for request in gateway.requests.values()}) == 1


async def test_a_prompt_of_cancelled_requests_is_not_encoded(make_line, pool, monkeypatch) -> None:
    cancelled = asyncio.Event()

    async def endless(text: str, **kwargs) -> list[int]:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return []

    monkeypatch.setattr(pool, "encode_text", endless)
    async with make_line().running(pool=pool) as line:
        gateway = Gateway(line)
        await gateway.send({n: inference_pb2.GenerateRequest(text=1000 * "x") for n in (1, 2)})
        await line.scheduler.until(lambda: line.generator.live.num_preparing == 2)
        await gateway.send(aborts=[1, 2])
        await asyncio.wait_for(cancelled.wait(), 10)


@pytest.mark.parametrize("labels", [{}, {"b": "x", "a": "y"}], ids=["plain", "labelled"])
def test_the_latency_histogram_is_an_ordinary_one(labels: dict[str, str]) -> None:
    buckets = (0.1, 1, 2.5, 1048576)
    ours = stats.LoopHistogram("test:ours", "Both.", buckets, list(labels))
    theirs = Histogram("test:theirs", "Both.", list(labels), registry=CollectorRegistry(), buckets=buckets)
    try:
        for value in (0.05, 0.1, 0.5, 2.5, 7.0):
            ours.labels(*labels.values()).observe(value)
            (theirs.labels(*labels.values()) if labels else theirs).observe(value)
        (family,) = ours.collect()
        (expected,) = theirs.collect()
    finally:
        REGISTRY.unregister(ours)
    wanted = [(s.name.removeprefix("test:theirs"), s.labels, s.value) for s in expected.samples]
    assert [(s.name.removeprefix("test:ours"), s.labels, s.value) for s in family.samples] == [
        sample for sample in wanted if sample[0] != "_created"
    ]
    assert family.type == expected.type


async def test_drained_once_no_prompt_is_encoded_and_no_request_live(make_line, pool, monkeypatch) -> None:
    """A shutdown waits for this."""
    encode_text, may_encode = pool.encode_text, asyncio.Event()

    async def slow_encode(text: str, **kwargs) -> list[int]:
        await may_encode.wait()
        return await encode_text(text, **kwargs)

    monkeypatch.setattr(pool, "encode_text", slow_encode)
    line = make_line(auto=False)
    async with line.running(pool=pool):
        await asyncio.wait_for(line.generator.live.drained(), 10)
        task = asyncio.create_task(line.generate(text=1000 * "x"))
        await line.scheduler.until(lambda: line.generator.live.num_preparing == 1)
        drained = asyncio.create_task(line.generator.live.drained())
        await asyncio.sleep(0.05)
        assert not drained.done()
        may_encode.set()
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        assert line.generator.live.num_preparing == 0
        await asyncio.sleep(0.05)
        assert not drained.done()
        line.scheduler.auto = True
        line.scheduler.step()
        await asyncio.wait_for(drained, 10)
        assert (await task).text == TEXT


async def test_resuming_much_text_does_not_hold_up_others(make_line, pool) -> None:
    """The event loop takes its turn between the pieces of what many resumed requests said before."""
    given = [504] * 20_000
    line = make_line(script=lambda request: [*given, 504], max_model_len=10**6)
    resumed = GenerateSubmission(request={"token_ids": {"ids": [5]}}, resume_token_ids=given)
    async with line.running(pool=pool):
        while line.link.model_info is None:
            await line.link.changed.wait()
        for _ in range(5):
            line.generator.start(Received.of_link(resumed), lambda output: None)
        num_turns = 0
        while line.generator.live.num_preparing:
            num_turns += 1
            await asyncio.sleep(0)
    assert num_turns >= 5 * len(given) / text_generator.REPLAY_PIECE


async def test_a_client_that_does_not_read_is_cancelled_and_delays_no_other(make_line, pool, monkeypatch) -> None:
    monkeypatch.setattr("pagewire.services.tokenizer.generation.client_session.MAX_UNREAD", 20_000)
    output = [504] * 400_000
    line = make_line(script=lambda request: output, max_model_len=10**6, tokens_per_step=500, auto=False)
    async with line.running(pool=pool):
        # Its answers fill the connection's buffers, then wait in the box, then are too many.
        lazy = line.stub.Generate(inference_pb2.GenerateRequest(text="x", sampling_params={"logprobs": 5}))
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        quick = asyncio.create_task(line.generate(text="x", sampling_params={"max_tokens": 5000}))
        await line.scheduler.until(lambda: line.scheduler.num_running == 2)
        while not line.scheduler.aborted:
            assert line.scheduler.num_running, "it was never cancelled"
            line.scheduler.step()
            await asyncio.sleep(0.002)
        assert line.scheduler.aborted == [line.scheduler.submissions[0].request_id]
        assert len((await quick).token_ids) == 5000
        code, details = await code_of(_read_all(lazy))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "has not read" in details


async def _read_all(call) -> None:
    async for _ in call:
        pass


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


async def test_a_gateway_that_does_not_read_delays_no_other(make_line, pool) -> None:
    line = make_line(script=lambda request: [504] * 5_000, max_model_len=10**6, tokens_per_step=10)
    async with line.running(pool=pool):
        lazy, quick = Gateway(line), Gateway(line)
        request = inference_pb2.GenerateRequest(text="x", sampling_params={"logprobs": 3})
        await lazy.send(dict.fromkeys(range(8), request))
        await line.scheduler.until(lambda: line.scheduler.num_running == 8)
        await quick.send({1: inference_pb2.GenerateRequest(text="x", sampling_params={"max_tokens": 2000})})
        await quick.read_until_finished(1)
        assert len(quick.requests[1].token_ids) == 2000
        # It gets everything when it reads at last.
        await line.scheduler.until(lambda: line.scheduler.num_running == 0)
        await lazy.read_until_finished(*range(8))
    for result in lazy.requests.values():
        assert result.error is None
        assert result.token_ids == [504] * 5_000


async def test_a_defect_in_one_request_fails_it_alone(make_line, pool) -> None:
    def script(request) -> list[int]:
        return [2**31 - 1, -5] if len(request.prompt_token_ids) == 2 else [504, 505]

    async with make_line(script=script).running(pool=pool) as line:
        gateway = Gateway(line)
        prompts = {n: inference_pb2.TokenIds(ids=[5] * n) for n in (1, 2, 3)}
        await gateway.send({n: inference_pb2.GenerateRequest(token_ids=ids) for n, ids in prompts.items()})
        await gateway.read_until_finished(1, 2, 3)
        assert line.scheduler.num_streams == 1
    assert gateway.requests[2].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert gateway.requests[1].token_ids == gateway.requests[3].token_ids == [504, 505]


async def test_a_defect_while_encoding_ends_the_spans(make_line, pool, spans, monkeypatch) -> None:
    async def encode_text(text: str, **kwargs) -> list[int]:
        raise RuntimeError("the tokenizer failed")

    monkeypatch.setattr(pool, "encode_text", encode_text)
    async with make_line().running(pool=pool) as line:
        assert (await code_of(line.generate(text=1000 * "x")))[0] == grpc.StatusCode.INTERNAL
    ended = {span.name: span.status.description for span in spans.get_finished_spans()}
    assert ended == {
        "encode": "the tokenizer failed",
        "text_completion SmolLM2-135M-Instruct.Q4_1": "RuntimeError: the tokenizer failed",
    }


async def test_spans_join_the_callers_trace_and_the_schedulers(make_line, pool, spans) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traceparent = f"00-{trace_id}-{parent_id}-01"
    async with make_line().running(pool=pool) as line:
        call = line.stub.Generate(inference_pb2.GenerateRequest(text="x"), metadata=[("traceparent", traceparent)])
        await _read_all(call)
        gateway = Gateway(line)
        await gateway.send({1: GenerateSubmission(request={"text": "x"}, context={"traceparent": traceparent})})
        await gateway.read_until_finished(1)
        forwarded = [submission.context.traceparent for submission in line.scheduler.submissions]
    ended = spans.get_finished_spans()
    generates = [span for span in ended if span.name.startswith("text_completion ")]
    encodes = [span for span in ended if span.name == "encode"]
    assert len(generates) == len(encodes) == 2
    for generate, encode, sent in zip(generates, encodes, forwarded, strict=True):
        assert f"{generate.context.trace_id:032x}" == trace_id
        assert f"{generate.parent.span_id:016x}" == parent_id
        assert encode.parent.span_id == generate.context.span_id
        assert sent == f"00-{trace_id}-{generate.context.span_id:016x}-01"
        assert generate.attributes["gen_ai.usage.input_tokens"] == 1
        assert generate.attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert generate.attributes["rpc.method"] == "pagewire.v1.InferenceService/Generate"


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


def details_of(error: grpc.aio.AioRpcError, kind: type) -> list:
    """The details of this kind that a status has, as clients with grpcio-status read them."""
    found = []
    for detail in rpc_status.from_call(error).details:
        message = kind()
        found += [message] if detail.Unpack(message) else []
    return found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"text": "Say", "sampling_params": {"temperature": -1, "top_p": 3}, "stop": ["a", ""]},
            ["stop[1]", "sampling_params.temperature", "sampling_params.top_p"],
        ),
        ({"token_ids": {"ids": [1, -2]}}, ["token_ids.ids"]),
        ({"text": ""}, ["text"]),
        (
            {"chat": {"messages": [{"content": "a"}, {"role": "user", "parts": [{}]}]}},
            ["chat.messages[0].role", "chat.messages[1].parts[0]"],
        ),
        (
            {"chat": {"messages": [{"role": "user"}, {"role": "assistant"}]}, "sampling_params": {"top_p": 3}},
            ["sampling_params.top_p", "chat.messages[0].content"],
        ),
        (
            {"chat": {"messages": [{"role": "user", "parts": [{"text": "a"}, {"image": {"url": "data:,x"}}]}]}},
            ["chat.messages"],
        ),
        ({"text": "Say", "n": 500}, ["n"]),
    ],
)
async def test_statuses_name_every_field_that_is_wrong(make_line, pool, fields, expected) -> None:
    async with make_line().running(pool=pool) as line:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await line.generate(**fields)
    [bad] = details_of(caught.value, BadRequest)
    assert [violation.field for violation in bad.field_violations] == expected
    assert all(violation.description for violation in bad.field_violations)
    [info] = details_of(caught.value, ErrorInfo)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "pagewire")


async def test_what_the_scheduler_refuses_is_named_as_the_client_knows_it(make_line, pool) -> None:
    why = "prompt_token_ids contains 99999; the vocabulary is 0 to 49151"
    error = common_pb2.RequestError(code=3, message=why)
    error.violations.add(field="prompt_token_ids", description=why)
    async with make_line(errors={0: error}).running(pool=pool) as line:
        with pytest.raises(grpc.aio.AioRpcError, match=r"token_ids\.ids contains 99999") as caught:
            await line.generate(token_ids={"ids": [1, 99999]})
    [bad] = details_of(caught.value, BadRequest)
    assert [violation.field for violation in bad.field_violations] == ["token_ids.ids"]


async def test_errors_say_when_to_try_again(make_line, pool) -> None:
    error = common_pb2.RequestError(code=8, message="too many wait")
    async with make_line(errors={0: error}).running(pool=pool) as line:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await line.generate(text="Say")
    assert [info.retry_delay.seconds for info in details_of(caught.value, RetryInfo)] == [1]
    assert not details_of(caught.value, BadRequest)


async def test_a_long_list_of_violations_fits_into_the_trailers(make_line, pool) -> None:
    messages = [{"content": "a"}] * 10_000
    async with make_line().running(pool=pool) as line:
        code, _ = await code_of(line.generate(chat={"messages": messages}))
    assert code == grpc.StatusCode.INVALID_ARGUMENT

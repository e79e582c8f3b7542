"""No request delays the tokens of another: long prompts, many prompts, slow readers."""

import asyncio
import threading

import grpc

from pagewire.services.tokenizer.generation import text_generator
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.prompts import encoder
from pagewire.services.tokenizer.received import Received
from pagewire.v1 import inference_pb2
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from tests.services.tokenizer.service.answers import TEXT, code_of, read_all
from tests.services.tokenizer.service_line import Gateway


async def test_a_long_prompt_does_not_hold_up_tokens_of_others(make_line, monkeypatch, smollm2_gguf) -> None:
    """A worker encodes 400,000 characters again and again until another request has received five tokens."""
    pool = TokenizerPool(FileSource(str(smollm2_gguf)), size=1)
    encode_text, has_tokens = pool.codec.encode_text, threading.Event()

    def encode_until_tokens(*args) -> list[int]:
        token_ids = encode_text(*args)
        while len(token_ids) > 10_000 and not has_tokens.is_set():
            encode_text(*args)
        return token_ids

    monkeypatch.setattr(pool.codec, "encode_text", encode_until_tokens)
    line = make_line(auto=False, max_model_len=10**6)
    try:
        async with line.running(pool=pool):
            short = line.stub.Generate(inference_pb2.GenerateRequest(text="x"))
            await line.scheduler.until(lambda: line.scheduler.num_running == 1)
            tokenize = line.stub.Tokenize(inference_pb2.TokenizeRequest(text="Lorem ipsum dolor " * 22_000))
            long = asyncio.create_task(wait_for(tokenize))
            # Were the event loop held while encoding, not one token would come through.
            for _ in range(5):
                line.scheduler.step()
                await short.read()
            assert not long.done()
            has_tokens.set()
            await long
    finally:
        has_tokens.set()
        pool.close()


async def wait_for(call):
    return await call


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
        code, details = await code_of(read_all(lazy))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "has not read" in details


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

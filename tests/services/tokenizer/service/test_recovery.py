"""Requests that are resumed, and requests that outlive the scheduler."""

import asyncio

import grpc
import pytest
from prometheus_client import REGISTRY

from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from pagewire.wire import rpc
from tests.services.tokenizer.service.answers import TEXT, code_of
from tests.services.tokenizer.service_line import EOS, Gateway, TokenizerLine

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("num_resumed", [1, 4, 7])
async def test_resume_goes_on_with_text_after_the_given_tokens(make_line, pool, tokens, num_resumed) -> None:
    async with make_line().running(pool=pool) as line:
        whole = await line.generate(text="Say", stop=["END"])
        first = whole.responses[:num_resumed]  # of a token each, or of several that were merged
        while sum(len(response.token_ids) for response in first) == len(whole.token_ids):
            first.pop()  # there would be nothing to resume
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
    reported = line.scheduler.submissions[0].context
    assert 20 < reported.timeout.ToMilliseconds() / 1000 < 30, "what is left of it"
    reported.ClearField("timeout")
    context.ClearField("timeout")
    assert reported == context


async def test_resume_that_already_met_a_stop_string_ends_at_once(make_line, pool, tokens) -> None:
    async with make_line().running(pool=pool) as line:
        whole = await line.generate(text="Say", stop=["END"])
        prompt = inference_pb2.TokenIds(ids=whole.prompt_token_ids)
        again = await line.generate(token_ids=prompt, resume_token_ids=whole.token_ids, stop=["END"])
        assert len(line.scheduler.requests) == 1
    assert (again.text, again.token_ids, again.finish_reason) == ("", [], STOP)
    assert (again.stop_string, again.usage.completion_tokens) == ("END", len(whole.token_ids))


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


async def test_whether_the_model_sleeps_is_unknown_until_a_scheduler_says_it(make_line, pool) -> None:
    line, request = make_line(), inference_pb2.CountRequestsRequest()
    async with line.running(pool=pool, with_scheduler=False):
        assert not (await line.stub.CountRequests(request)).HasField("sleep_level")
        await line.start_scheduler()
        await line.generate(text="x")
        told = await line.stub.CountRequests(request)
        assert told.HasField("sleep_level") and told.sleep_level == 0


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

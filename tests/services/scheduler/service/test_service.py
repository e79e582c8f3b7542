"""The scheduler service over real gRPC, with a fake executor behind it."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY

from pagewire.config import SchedulerConfig
from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.costs import pacing
from pagewire.services.scheduler.main import MAX_PUBLIC_BYTES, make_public_server
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.service.request_output import new_outbox
from pagewire.services.scheduler.values.step import StepResult
from pagewire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    scheduler_link_pb2,
    scheduler_link_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from pagewire.wire import rpc
from pagewire.wire.status import error_details
from tests.fakes import FakeExecutor, FakeExecutorServicer, expected_output, fake_prompt_logprobs
from tests.services.scheduler.service_line import Collected, ServiceLine, generate_request, token_submission

VOCAB_SIZE = 1000
Connect = scheduler_link_pb2.SchedulerLinkServiceConnectRequest


def prompt_of(number: int, length: int = 20) -> list[int]:
    return [(number * 37 + i * i) % VOCAB_SIZE for i in range(length)]


def output_of(number: int, max_tokens: int, length: int = 20) -> list[int]:
    return expected_output(prompt_of(number, length), max_tokens, vocab_size=VOCAB_SIZE)


def make_line(tmp_path: Path, *, step_seconds: float = 0.0, num_blocks: int = 256, **config: Any) -> ServiceLine:
    executor = FakeExecutorServicer(lambda: FakeExecutor(num_blocks=num_blocks), step_seconds=step_seconds)
    return ServiceLine(tmp_path, executor, **config)


async def collect(line: ServiceLine, request: scheduler_pb2.SchedulerServiceGenerateRequest) -> list:
    return [response async for response in line.stub.Generate(request)]


async def rest_of(call: grpc.aio.UnaryStreamCall) -> list:
    """Returns the rest of a call, after its first responses were taken with read()."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def test_generate_streams_all_tokens_with_usage(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        responses = await collect(line, generate_request(prompt_of(1), max_tokens=30))
        assert [t for r in responses for t in r.token_ids] == output_of(1, 30)
        assert [r.finish_reason for r in responses[:-1]] == [0] * (len(responses) - 1)
        last = responses[-1]
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (20, 30, 0)

        again = await collect(line, generate_request(prompt_of(1), max_tokens=30))
        assert [t for r in again for t in r.token_ids] == output_of(1, 30)
        assert again[-1].usage.cached_tokens == 16
        await line.wait_until_free()


async def test_a_seed_of_the_server_makes_calls_without_one_reproducible(tmp_path: Path) -> None:
    async with make_line(tmp_path, seed=42).running() as line:
        for number in (1, 2, 1):
            await collect(line, generate_request(prompt_of(number), max_tokens=1))
    seeds = [request.sampling_params.seed for request in line.executor.new_requests]
    assert seeds[0] == seeds[2] != seeds[1]


async def test_blocks_are_shared_only_under_the_same_salt(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        cached = []
        for salt in ("", "mine", "yours", "", "mine", "yours"):
            responses = await collect(line, generate_request(prompt_of(1), max_tokens=3, cache_salt=salt))
            assert [t for r in responses for t in r.token_ids] == output_of(1, 3)
            cached.append(responses[-1].usage.cached_tokens)
        assert cached == [0, 0, 0, 16, 16, 16]
        assert line.engine.scheduler.replicas[0].counts.num_prefix_hits == 48
        with pytest.raises(grpc.aio.AioRpcError, match="cache_salt has 129 characters; 128 are possible") as error:
            await collect(line, generate_request(prompt_of(1), cache_salt="s" * 129))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_stop_token_is_reported_and_logprobs_come_along(tmp_path: Path) -> None:
    tokens = output_of(2, 5)
    async with make_line(tmp_path).running() as line:
        request = generate_request(prompt_of(2), stop_token_ids=[tokens[3]], logprobs=2)
        responses = await collect(line, request)
        assert [t for r in responses for t in r.token_ids] == tokens[:4]
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP
        assert responses[-1].stop_token_id == tokens[3]
        assert all(r.logprobs.entries_per_token == 3 for r in responses)
        assert [t for r in responses for t in r.logprobs.token_ids[::3]] == tokens[:4]


async def test_prompt_logprobs_come_once_and_with_the_first_token(tmp_path: Path) -> None:
    """A cached prompt is computed nevertheless; other requests find its blocks."""
    async with make_line(tmp_path).running() as line:
        await collect(line, generate_request(prompt_of(1), max_tokens=1))
        first, *others = await collect(line, generate_request(prompt_of(1), max_tokens=5, prompt_logprobs=2))
        assert first.prompt_logprobs == fake_prompt_logprobs(prompt_of(1), 2, VOCAB_SIZE)
        assert not any([first.HasField("logprobs"), *(r.HasField("prompt_logprobs") for r in others)])
        assert [t for r in (first, *others) for t in r.token_ids] == output_of(1, 5)
        assert others[-1].usage.cached_tokens == 0
        await collect(line, generate_request(prompt_of(2), max_tokens=1, prompt_logprobs=0))
        again = await collect(line, generate_request(prompt_of(2), max_tokens=1))
        assert again[-1].usage.cached_tokens == 16 and not again[0].HasField("prompt_logprobs")
        (alone,) = await collect(line, generate_request([7], max_tokens=1, prompt_logprobs=2))
        assert alone.HasField("prompt_logprobs") and not alone.prompt_logprobs.ranks
        await line.wait_until_free()


async def test_prompt_logprobs_come_once_whichever_executor_dies(tmp_path: Path) -> None:
    """Requests are aborted within the prompt, and after the first token."""
    executor = FakeExecutorServicer(lambda: FakeExecutor(max_num_batched_tokens=8), step_seconds=0.002)
    async with ServiceLine(tmp_path, executor).running() as line:
        line.executor.fail_after(3)
        call = line.stub.Generate(generate_request(prompt_of(1, 50), max_tokens=30, prompt_logprobs=1))
        first = await call.read()
        line.executor.fail_after(2)
        others = await rest_of(call)
        assert first.prompt_logprobs == fake_prompt_logprobs(prompt_of(1, 50), 1, VOCAB_SIZE)
        assert not any(response.HasField("prompt_logprobs") for response in others)
        assert [t for r in (first, *others) for t in r.token_ids] == output_of(1, 30, 50)
        assert line.executor.num_streams == 3
        call = line.link.Connect()
        resumed = token_submission(1, prompt_of(3), output_of(3, 5), max_tokens=12, prompt_logprobs=1)
        await call.write(
            Connect(requests=[resumed, token_submission(2, prompt_of(4), max_tokens=2, prompt_logprobs=3)])
        )
        collected = Collected()
        await collected.read_until_finished(call, 1, 2)
        assert collected.prompt_logprobs == {2: [fake_prompt_logprobs(prompt_of(4), 3, VOCAB_SIZE)]}


async def test_more_log_probabilities_of_a_prompt_than_fit_into_a_message_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.config.sampling_checks.MAX_PROMPT_LOGPROBS", 60)
    async with make_line(tmp_path).running() as line:
        assert await collect(line, generate_request(prompt_of(1), max_tokens=1, prompt_logprobs=2))
        with pytest.raises(grpc.aio.AioRpcError, match="20 tokens of the prompt, that makes 80") as error:
            await collect(line, generate_request(prompt_of(1), max_tokens=1, prompt_logprobs=3))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3"),
        ({"frequency_penalty": -3.0}, "frequency_penalty is -3"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
        ({"stop_token_ids": [1000]}, "stop_token_ids contains 1000"),
        ({"logit_bias_ids": [5000], "logit_bias_values": [1.0]}, "logit_bias_ids contains 5000"),
        ({"logit_bias_ids": [5], "logit_bias_values": [101.0]}, "logit_bias_values of token 5 is 101"),
        ({"logit_bias_ids": [5]}, "logit_bias_values has 0 entries"),
    ],
)
async def test_invalid_parameters_are_named(tmp_path: Path, fields: dict, message: str) -> None:
    async with make_line(tmp_path).running() as line:
        await line.wait_for_executor(True)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(line, generate_request([1, 2], **fields))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert message in (error.value.details() or "")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt_token_ids is empty"),
        ([1, 1000], "prompt_token_ids contains 1000"),
        ([1] * 64, "64 tokens, but the KV cache holds 4 blocks of 16 tokens = 64"),
        ([1] * 4096, "maximum context length is 4096 tokens, but the prompt has 4096 tokens"),
    ],
)
async def test_impossible_prompts_are_refused(tmp_path: Path, prompt: list[int], message: str) -> None:
    async with make_line(tmp_path, num_blocks=4).running() as line:
        await line.wait_for_executor(True)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(line, generate_request(prompt))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert message in (error.value.details() or "")


async def test_connect_greets_then_answers_in_columns(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.005).running() as line:
        call = line.link.Connect()
        numbers = range(100, 108)
        await call.write(Connect(requests=[token_submission(n, prompt_of(n), max_tokens=25) for n in numbers]))
        collected = Collected()
        await collected.read_until_finished(call, *numbers)
        assert len(collected.hellos) == 1 and collected.hellos[0].vocab_size == VOCAB_SIZE
        for n in numbers:
            assert collected.token_ids[n] == output_of(n, 25)
            assert collected.finish_reasons[n] == [common_pb2.FINISH_REASON_LENGTH]
        # One response per step for all, not one per token.
        assert collected.num_responses <= line.executor.num_steps + 1
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        await line.wait_until_free()


async def test_connect_carries_errors_of_single_requests(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        call = line.link.Connect()
        good, bad = token_submission(1, prompt_of(1), max_tokens=3), token_submission(2, [VOCAB_SIZE], max_tokens=3)
        await call.write(Connect(requests=[bad, good]))
        collected = Collected()
        await collected.read_until_finished(call, 1, 2)
        assert collected.token_ids[1] == output_of(1, 3)
        assert collected.finish_reasons[2] == [common_pb2.FINISH_REASON_ERROR]
        assert collected.errors[2].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "prompt_token_ids contains 1000" in collected.errors[2].message


async def test_connect_resumes_where_an_earlier_attempt_ended(tmp_path: Path) -> None:
    tokens = output_of(3, 12)
    async with make_line(tmp_path).running() as line:
        call = line.link.Connect()
        requests = [
            token_submission(1, prompt_of(3), tokens[:5], max_tokens=12),
            token_submission(2, prompt_of(3), tokens, max_tokens=12),
        ]
        await call.write(Connect(requests=requests))
        collected = Collected()
        await collected.read_until_finished(call, 1, 2)
        assert collected.token_ids == {1: tokens[5:], 2: []}
        assert collected.finish_reasons == {n: [common_pb2.FINISH_REASON_LENGTH] for n in (1, 2)}


async def test_connect_abort_frees_and_is_not_answered(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.005).running() as line:
        call = line.link.Connect()
        await call.write(Connect(requests=[token_submission(n, prompt_of(n), max_tokens=200) for n in (1, 2)]))
        collected = Collected()
        while len(collected.token_ids) < 2:
            collected.add(await call.read())
        await call.write(Connect(abort_request_ids=[1, 77]))
        await collected.read_until_finished(call, 2)
        assert 1 not in collected.finish_reasons and len(collected.token_ids[1]) < 200
        assert collected.token_ids[2] == output_of(2, 200)
        await line.wait_until_free()


async def test_a_number_in_use_is_an_error_of_the_stream(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.01).running() as line:
        call = line.link.Connect()
        await call.write(Connect(requests=[token_submission(1, prompt_of(1), max_tokens=100)] * 2))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "request number 1 is in use" in (error.value.details() or "")
        await line.wait_until_free()


async def test_bytes_that_are_no_message_end_the_stream(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with make_line(tmp_path).running() as line:
        call = line.channel.stream_stream("/pagewire.v1.SchedulerLinkService/Connect")()
        await call.write(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            while await asyncio.wait_for(call.read(), 30) is not grpc.aio.EOF:
                pass
        assert error.value.code() == grpc.StatusCode.INTERNAL
        assert "the request of /pagewire.v1.SchedulerLinkService/Connect cannot be decoded" in error.value.details()
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_vanished_neighbour_leaves_nothing_behind(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.005).running() as line:
        call = line.link.Connect()
        await call.write(Connect(requests=[token_submission(n, prompt_of(n), max_tokens=2000) for n in range(8)]))
        collected = Collected()
        while len(collected.token_ids) < 8:
            collected.add(await call.read())
        assert (await line.load()).num_running == 8
        call.cancel()
        await line.wait_until_free()
        assert not line.engine._delivery.live


async def test_a_neighbour_that_does_not_read_delays_no_other(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        silent, reading = line.link.Connect(), line.link.Connect()
        for number in range(4):
            await silent.write(Connect(requests=[token_submission(number, prompt_of(9), max_tokens=500)]))
        await reading.write(Connect(requests=[token_submission(1, prompt_of(1), max_tokens=100)]))
        collected = Collected()
        await collected.read_until_finished(reading, 1)
        assert collected.token_ids[1] == output_of(1, 100)
        silent.cancel()
        reading.cancel()
        await line.wait_until_free()


async def test_much_output_comes_in_several_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.wire.streams.session.MAX_PER_MESSAGE", 10)
    async with make_line(tmp_path).running() as line:
        call = line.link.Connect()
        numbers = range(12)
        requests = [token_submission(n, prompt_of(n), max_tokens=10, logprobs=n % 3) for n in numbers]
        await call.write(Connect(requests=requests))
        collected = Collected()
        await collected.read_until_finished(call, *numbers)
        assert all(collected.token_ids[n] == output_of(n, 10) for n in numbers)
        assert collected.num_responses > line.executor.num_steps


async def test_a_request_with_output_that_is_not_read_is_ended(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        outbox = new_outbox()
        line.engine.submit(token_submission(0, prompt_of(1), max_tokens=2000), outbox, 5, max_unread=20)
        line.engine.submit(token_submission(0, prompt_of(1), max_tokens=20), outbox, 6, max_unread=20)
        await line.engine.drained()
        outputs = await outbox.take()
        assert outputs[5].error is not None and outputs[5].error.code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "more than 20 tokens and log probabilities wait" in outputs[5].error.message and len(
            outputs[5].token_ids
        ) in (22, 23)
        assert outputs[6].error is None and outputs[6].token_ids == output_of(1, 20)
        await line.wait_until_free()


async def test_log_probabilities_count_as_unread(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        outbox = new_outbox()
        line.engine.submit(token_submission(0, prompt_of(1), max_tokens=2000, logprobs=2), outbox, 5, max_unread=20)
        await line.engine.drained()
        (output,) = (await outbox.take()).values()
        assert output.error is not None and output.logprobs is not None
        assert len(output.token_ids) == len(output.logprobs) < 10


async def test_what_a_stream_does_not_take_is_bounded_for_all_its_requests(tmp_path: Path, monkeypatch) -> None:
    """The request that exceeds the limit ends; requests of other streams continue."""
    monkeypatch.setattr("pagewire.services.scheduler.service.delivery.MAX_UNREAD_OF_STREAM", 60)
    async with make_line(tmp_path).running() as line:
        stalled, other = new_outbox(), new_outbox()
        for number in range(4):
            line.engine.submit(token_submission(0, prompt_of(1), max_tokens=2000), stalled, number)
        line.engine.submit(token_submission(0, prompt_of(1), max_tokens=50), other, 7)
        await line.engine.drained()
        outputs = await stalled.take()
        assert {output.error and output.error.code for output in outputs.values()} == {
            grpc.StatusCode.RESOURCE_EXHAUSTED
        }
        assert 60 < sum(len(output.token_ids) for output in outputs.values()) < 100
        assert (await other.take())[7].token_ids == output_of(1, 50)
        # Once it reads again, it is served again.
        line.engine.submit(token_submission(0, prompt_of(1), max_tokens=20), stalled, 8)
        await line.engine.drained()
        assert (await stalled.take())[8].token_ids == output_of(1, 20)
        await line.wait_until_free()


async def test_cancelled_generate_is_aborted(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.005).running() as line:
        call = line.stub.Generate(generate_request(prompt_of(1), max_tokens=2000))
        await call.read()
        call.cancel()
        await line.wait_until_free()


async def test_abort_by_external_id(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.005).running() as line:
        call = line.stub.Generate(generate_request(prompt_of(1), max_tokens=2000, external_id="mine"))
        await call.read()
        request = scheduler_pb2.AbortRequest(external_ids=["mine", "unknown"])
        assert (await line.stub.Abort(request)).num_aborted == 1
        responses = await rest_of(call)
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_ABORT
        await line.wait_until_free()


async def test_an_end_from_outside_takes_no_token_away(tmp_path: Path) -> None:
    """All requests end while a result is undelivered: all counted tokens are delivered nevertheless."""
    async with make_line(tmp_path, step_seconds=0.002).running() as line:
        update = line.engine.scheduler.update
        num_left = 0

        def update_then_abort(replica: Replica, result: StepResult, seconds: float = 0.0) -> Outputs:
            nonlocal num_left
            outputs = update(replica, result, seconds)
            num_left -= len(outputs.requests)
            if num_left == 0:
                # Runs before the callback that delivers.
                asyncio.get_running_loop().call_soon(line.engine.abort_external, {"mine"})
            return outputs

        line.engine.scheduler.update = update_then_abort  # type: ignore[method-assign]
        for num_results in (1, 2, 5, 6):
            num_left = num_results
            responses = await collect(line, generate_request(prompt_of(1), max_tokens=5, external_id="mine"))
            tokens = [t for r in responses for t in r.token_ids]
            assert tokens == output_of(1, 5)[: len(tokens)]
            assert responses[-1].usage.completion_tokens == len(tokens) == min(num_results, 5)
            ends = common_pb2.FINISH_REASON_ABORT, common_pb2.FINISH_REASON_LENGTH
            assert responses[-1].finish_reason == ends[num_results >= 5]
        await line.wait_until_free()


async def test_a_tiny_temperature_is_greedy(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        for temperature in (0.0, 1e-38, 2e-5, 0.5):
            await collect(line, generate_request(prompt_of(1), max_tokens=2, temperature=temperature))
        temperatures = [new.sampling_params.temperature for new in line.executor.new_requests]
        assert temperatures == pytest.approx([0.0, 0.0, 2e-5, 0.5], rel=1e-6, abs=0)


async def test_get_load(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.005, max_num_seqs=2).running() as line:
        call = line.link.Connect()
        await call.write(Connect(requests=[token_submission(n, prompt_of(n), max_tokens=500) for n in range(3)]))
        collected = Collected()
        while len(collected.token_ids) < 2:
            collected.add(await call.read())
        load = await line.load()
        assert (load.num_running, load.num_waiting, load.num_executors) == (2, 1, 1)
        assert (load.num_blocks, load.block_size, load.max_num_seqs) == (256, 16, 2)
        assert load.num_free_blocks <= 252
        assert load.model_info.model == "fake"


async def test_who_arrives_during_a_long_step_is_in_the_next_one(tmp_path: Path) -> None:
    """The second of two steps in flight is decided shortly before the first one ends."""
    async with make_line(tmp_path, step_seconds=0.1, pipeline_depth=2).running() as line:
        running = line.stub.Generate(generate_request(prompt_of(0), max_tokens=500))
        for _ in range(5):
            await running.read()
        steps_missed = []
        for number in range(1, 7):
            num_steps = line.executor.num_steps
            while line.executor.num_steps == num_steps:
                await running.read()
            num_steps = line.executor.num_steps  # one step has just ended, another runs
            newcomer = line.stub.Generate(generate_request(prompt_of(number), max_tokens=1))
            await newcomer.read()
            steps_missed.append(line.executor.num_steps - num_steps - 1)
        assert sorted(steps_missed)[len(steps_missed) // 2] == 1, f"{steps_missed}: only the one that ran already"


async def test_steps_that_come_too_late_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts each that comes after the end of another: on one machine it comes within what a device tolerates."""
    monkeypatch.setattr(pacing, "_TOLERANCE", 0.0)
    async with make_line(tmp_path, step_seconds=0.06, pipeline_depth=2).running() as line:
        before = REGISTRY.get_sample_value("pagewire:late_steps_total")
        call = line.stub.Generate(generate_request(prompt_of(0), max_tokens=500))
        async with asyncio.timeout(20):
            while REGISTRY.get_sample_value("pagewire:late_steps_total") == before:
                await call.read()
                line.executor.step_seconds = 0.36 - line.executor.step_seconds  # long and short, in turns


async def test_a_full_queue_refuses(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.01, max_num_seqs=1, max_waiting_requests=1).running() as line:
        running = line.stub.Generate(generate_request(prompt_of(1), max_tokens=500))
        await running.read()
        waiting = line.stub.Generate(generate_request(prompt_of(2), max_tokens=5))
        await line.wait_for_waiting(1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(line, generate_request(prompt_of(3)))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "1 requests are waiting" in (error.value.details() or "")
        again = token_submission(1, prompt_of(3), max_tokens=3)
        again.resubmitted = True
        call = line.link.Connect()
        await call.write(Connect(requests=[again]))
        await line.wait_for_waiting(2)
        running.cancel()
        collected = Collected()
        await collected.read_until_finished(call, 1)
        assert collected.token_ids[1] == output_of(3, 3), "a resubmitted request is let in"
        assert [t for r in await rest_of(waiting) for t in r.token_ids] == output_of(2, 5)


@pytest.mark.parametrize(("pipeline_depth", "step_seconds"), [(1, 0.005), (2, 0.005), (2, 0.05)])
async def test_nothing_is_lost_when_the_executor_dies(tmp_path: Path, pipeline_depth: int, step_seconds: float) -> None:
    """Steps are so long that the next one is held back."""
    line = make_line(tmp_path, step_seconds=step_seconds, pipeline_depth=pipeline_depth)
    async with line.running():
        call = line.link.Connect()
        numbers = range(8)
        await call.write(Connect(requests=[token_submission(n, prompt_of(n), max_tokens=150) for n in numbers]))
        collected = Collected()
        while sum(map(len, collected.token_ids.values())) < 100:
            collected.add(await call.read())
        # A broken stream to the same process, then another process behind the address.
        line.executor.fail_after(3)
        while sum(map(len, collected.token_ids.values())) < 250:
            collected.add(await call.read())
        await line.kill_executor()
        await line.wait_for_executor(False)
        await line.start_executor(make_line(tmp_path, step_seconds=0.001, num_blocks=300).executor)
        await collected.read_until_finished(call, *numbers)
        for n in numbers:
            assert collected.token_ids[n] == output_of(n, 150)
            assert collected.finish_reasons[n] == [common_pb2.FINISH_REASON_LENGTH]
        assert line.executor.num_streams == 1
        resumed = [new for new in line.executor.new_requests if len(new.token_ids) > new.num_prompt_tokens]
        assert len(resumed) == 8
        assert (await line.wait_until_free()).num_blocks == 300


async def test_a_request_that_kills_every_executor_ends_and_the_others_do_not(tmp_path: Path) -> None:
    executor = FakeExecutorServicer(lambda: FakeExecutor(deadly_token_id=999))
    async with ServiceLine(tmp_path, executor).running() as line:
        call = line.link.Connect()
        requests = [token_submission(n, prompt_of(n), max_tokens=100) for n in range(4)]
        await call.write(Connect(requests=[*requests, token_submission(9, [999, 1, 2], max_tokens=5)]))
        collected = Collected()
        await collected.read_until_finished(call, 0, 1, 2, 3, 9)
        for n in range(4):
            assert collected.token_ids[n] == output_of(n, 100)
            assert collected.finish_reasons[n] == [common_pb2.FINISH_REASON_LENGTH]
        assert collected.token_ids[9] == []
        assert collected.finish_reasons[9] == [common_pb2.FINISH_REASON_ERROR]
        assert collected.errors[9].code == grpc.StatusCode.INTERNAL.value[0]
        assert "failed 2 times while it ran this request, the last time" in collected.errors[9].message
        assert "(INTERNAL: fatal device error: a deadly token)" in collected.errors[9].message
        assert executor.num_streams == 3
        await line.wait_until_free()


async def test_a_drawn_seed_survives_the_executor(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.002).running() as line:
        call = line.stub.Generate(generate_request(prompt_of(1), max_tokens=30))
        await call.read()
        line.executor.fail_after(2)
        tokens = [t for r in await rest_of(call) for t in r.token_ids]
        assert tokens == output_of(1, 30)[1:]
        first, second = line.executor.new_requests
        assert first.sampling_params.HasField("seed")
        assert first.sampling_params == second.sampling_params


async def test_an_answer_to_no_question_starts_a_new_stream(tmp_path: Path) -> None:
    async with make_line(tmp_path, step_seconds=0.002).running() as line:
        call = line.stub.Generate(generate_request(prompt_of(1), max_tokens=30))
        await call.read()
        line.executor.answer_wrongly()
        tokens = [t for r in await rest_of(call) for t in r.token_ids]
        assert tokens == output_of(1, 30)[1:]
        assert line.executor.num_streams == 2


async def test_without_an_executor_requests_wait_then_fail(tmp_path: Path) -> None:
    line = make_line(tmp_path, recovery_timeout=0.5)
    async with line.running(with_executor=False):
        health = health_pb2_grpc.HealthStub(line.channel)
        check = health_pb2.HealthCheckRequest(service="pagewire.v1.SchedulerService")
        serving = health_pb2.HealthCheckResponse
        assert (await health.Check(check)).status == serving.NOT_SERVING

        async def fails() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(line, generate_request(prompt_of(1), max_tokens=4))
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "--executor-address" in (error.value.details() or "")

        await fails()  # has waited
        await fails()  # is refused
        connect = line.link.Connect()
        with pytest.raises(grpc.aio.AioRpcError):
            await connect.read()
        await line.start_executor()
        await line.wait_for_executor(True)
        responses = await collect(line, generate_request(prompt_of(1), max_tokens=4))
        assert [t for r in responses for t in r.token_ids] == output_of(1, 4)
        assert (await health.Check(check)).status == serving.SERVING


async def test_an_executor_that_takes_long_to_start_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = make_line(tmp_path, recovery_timeout=0.3)
    line.executor.loaded.clear()
    async with line.running():
        with pytest.raises(grpc.aio.AioRpcError):
            await line.link.Connect().read()  # ends when the scheduler gives up
        with pytest.raises(grpc.aio.AioRpcError, match="is not ready yet, as when it loads a model; try again later"):
            await collect(line, generate_request(prompt_of(1), max_tokens=4))
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        line.executor.loaded.set()
        await line.wait_for_executor(True)
        responses = await collect(line, generate_request(prompt_of(1), max_tokens=4))
        assert [t for r in responses for t in r.token_ids] == output_of(1, 4)


async def test_requests_that_came_before_the_executor_are_served(tmp_path: Path) -> None:
    line = make_line(tmp_path)
    async with line.running(with_executor=False):
        good = asyncio.create_task(collect(line, generate_request(prompt_of(1), max_tokens=4)))
        bad = asyncio.create_task(collect(line, generate_request([VOCAB_SIZE], max_tokens=4)))
        await line.wait_for_waiting(2)
        await line.start_executor()
        assert [t for r in await good for t in r.token_ids] == output_of(1, 4)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await bad
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_executor_that_loads_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line = make_line(tmp_path)
    line.executor.loaded.clear()
    async with line.running():
        tokens = asyncio.create_task(collect(line, generate_request(prompt_of(1), max_tokens=4)))
        await line.wait_for_waiting(1)
        await asyncio.wait_for(line.executor.asked.wait(), 10)
        assert line.engine.scheduler.info is None
        line.executor.loaded.set()
        assert [t for r in await tokens for t in r.token_ids] == output_of(1, 4)
        assert (line.executor.num_descriptions, line.executor.num_streams) == (1, 1), "asked once, not again and again"

        # A stream that was idle from its start is missed, too.
        await line.kill_executor()
        await line.wait_for_executor(False)
        await line.start_executor(FakeExecutorServicer())
        await line.wait_for_executor(True)
        caplog.clear()
        await line.kill_executor()
        await line.wait_for_executor(False)
        assert "lost the stream to the executor" in caplog.text


async def test_another_model_is_announced(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        call = line.link.Connect()
        assert (await call.read()).hello.model == "fake"
        await line.kill_executor()
        await line.wait_for_executor(False)
        await line.start_executor(FakeExecutorServicer(model="other"))
        async with asyncio.timeout(10):
            assert (await call.read()).hello.model == "other"
        call.cancel()


async def test_metrics_of_scheduler_and_executor(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        await collect(line, generate_request(prompt_of(1), max_tokens=4))
        admin = admin_pb2_grpc.AdminServiceStub(line.channel)
        services = (await admin.GetMetrics(admin_pb2.GetMetricsRequest())).services
        assert [s.service for s in services] == ["scheduler", "executor"]
        exposition = services[0].exposition
        for name in ("num_requests_running", "kv_cache_usage_perc", "num_preemptions_total", "generation_tokens_total"):
            assert f"\npagewire:{name} " in exposition
        assert 'pagewire:request_success_total{finished_reason="length"}' in exposition


async def test_prompts_read_whole_are_no_longer_than_a_step(tmp_path):
    """The limit is reported to tokenizers, which truncate texts to what the model takes."""
    executor = FakeExecutorServicer(whole_prompts=True)
    async with ServiceLine(tmp_path, executor, max_num_batched_tokens=100).running() as line:
        await line.wait_for_executor(present=True)
        assert (await line.load()).model_info.max_model_len == 100
    executor = FakeExecutorServicer()
    async with ServiceLine(tmp_path, executor, max_num_batched_tokens=100).running() as line:
        await line.wait_for_executor(present=True)
        assert (await line.load()).model_info.max_model_len == 4096


async def test_violations_are_named_from_the_request_on(tmp_path: Path) -> None:
    async with make_line(tmp_path).running() as line:
        await line.wait_for_executor(True)
        for request, expected in (
            (generate_request([1], top_p=3, temperature=-1), ["temperature", "top_p"]),
            (generate_request([]), None),
            (generate_request([VOCAB_SIZE]), None),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(line, request)
            fields = [field for field, _ in error_details.violations_of(error.value)]
            paths = ["prompt_token_ids"] if expected is None else [f"sampling_params.{name}" for name in expected]
            assert fields == [f"request.{path}" for path in paths]


@pytest.mark.parametrize(("policy", "message"), [("fcfs", "--scheduling-policy priority"), ("priority", None)])
async def test_a_priority_is_refused_where_it_would_do_nothing(
    tmp_path: Path, policy: str, message: str | None
) -> None:
    async with make_line(tmp_path, scheduling_policy=policy).running() as line:
        await line.wait_for_executor(True)
        assert await collect(line, generate_request([1], max_tokens=2, priority=0))
        if message is None:
            assert await collect(line, generate_request([1], max_tokens=2, priority=-3))
            return
        with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
            await collect(line, generate_request([1], max_tokens=2, priority=-3))
        assert error_details.violations_of(refused.value)[0][0] == "request.sampling_params.priority"


@pytest.mark.parametrize(
    ("policy", "params", "priority"), [("priority", {}, 100), ("priority", {"priority": -1}, -1), ("fcfs", {}, 0)]
)
def test_requests_of_a_batch_come_after_those_without_a_priority(
    policy: str, params: dict[str, Any], priority: int
) -> None:
    submission = token_submission(1, [1], max_tokens=2, **params)
    submission.context.is_batch = True
    request = convert.to_request(1, submission, SchedulerConfig(scheduling_policy=policy))
    assert request.sampling_params.priority == priority


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"max_tokens": 4094}, "max_tokens is too large: 4094. This model's maximum context length is 4096 tokens"),
        ({"min_tokens": 4094}, "min_tokens is too large: 4094"),
        ({"max_tokens": 2**31 - 1}, "max_tokens is too large: 2147483647.*the prompt has 3, which leaves 4093"),
    ],
)
async def test_more_output_than_there_is_room_for_is_refused(
    tmp_path: Path, params: dict[str, int], wanted: str
) -> None:
    async with make_line(tmp_path).running() as line:
        await line.wait_for_executor(True)
        with pytest.raises(grpc.aio.AioRpcError, match=wanted) as refused:
            await collect(line, generate_request([1, 2, 3], **params))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        [name] = params
        assert error_details.violations_of(refused.value)[0][0] == f"request.sampling_params.{name}"


async def test_max_tokens_is_lowered_for_those_who_say_so_and_for_those_already_admitted(tmp_path: Path) -> None:
    executor = FakeExecutorServicer(max_model_len=30)
    async with ServiceLine(tmp_path, executor).running() as line:
        await line.wait_for_executor(True)
        exact = generate_request(prompt_of(1, 20), max_tokens=10, ignore_eos=True)
        assert sum(len(r.token_ids) for r in await collect(line, exact)) == 10
        lowered = generate_request(prompt_of(1, 20), max_tokens=11, ignore_eos=True)
        lowered.request.clamp_max_tokens = True
        assert sum(len(r.token_ids) for r in await collect(line, lowered)) == 10
        submission = token_submission(1, prompt_of(1, 20), max_tokens=11, ignore_eos=True)
        submission.resubmitted = True
        call, collected = line.link.Connect(), Collected()
        await call.write(Connect(requests=[submission]))
        await collected.read_until_finished(call, 1)
        assert len(collected.token_ids[1]) == 10


async def test_public_server_generates_and_has_no_link(tmp_path: Path) -> None:
    async with make_line(tmp_path, public_listen=f"unix:{tmp_path}/public.sock").running() as line:
        server = make_public_server(line.config, line.engine)
        await server.start()
        async with rpc.channel(line.config.public_listen) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            call = stub.Generate(generate_request(prompt_of(1), external_id="mine", max_tokens=5))
            responses = [response async for response in call]
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await scheduler_link_pb2_grpc.SchedulerLinkServiceStub(channel).Connect(iter([])).read()
            large = generate_request([1], external_id="x" * (MAX_PUBLIC_BYTES + 1), max_tokens=5)
            with pytest.raises(grpc.aio.AioRpcError) as too_large:
                await stub.Generate(large).read()
        await server.stop()
    assert too_large.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert [t for r in responses for t in r.token_ids] == output_of(1, 5)
    assert (responses[0].request_id, {r.request_id for r in responses[1:]}) == ("mine", {""})
    assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED

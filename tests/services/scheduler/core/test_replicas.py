"""Several executors behind one scheduler, and several schedulers before one executor."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from pagewire.config import SchedulerConfig
from pagewire.errors import StartupError
from pagewire.services.scheduler.core.scheduler import NotInterchangeable
from pagewire.services.scheduler.main import serve
from pagewire.services.scheduler.suspicion.suspects import MAX_SILENT_LOSSES
from pagewire.services.scheduler.values.request import FinishReason
from pagewire.v1 import common_pb2
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest, TokenSubmission
from tests.e2e import fake_executor
from tests.fakes import FakeExecutor, FakeExecutorServicer, expected_output
from tests.services.scheduler.pure_line import PureLine
from tests.services.scheduler.service_line import Collected, ServiceLine, generate_request, token_submission

VOCAB_SIZE = 1000
Connect = SchedulerLinkServiceConnectRequest


def prompt_of(number: int, length: int = 20) -> list[int]:
    return [(number * 101 + i) % VOCAB_SIZE for i in range(length)]


def output_of(number: int, max_tokens: int) -> list[int]:
    return expected_output(prompt_of(number), max_tokens, vocab_size=VOCAB_SIZE)


def executors(count: int, *, step_seconds: float = 0.002, model: str = "fake") -> list[FakeExecutorServicer]:
    return [FakeExecutorServicer(FakeExecutor, step_seconds=step_seconds, model=model) for _ in range(count)]


async def submit(line: ServiceLine, count: int, max_tokens: int) -> tuple[grpc.aio.StreamStreamCall, Collected]:
    call = line.link.Connect()
    requests = [token_submission(n, prompt_of(n), max_tokens=max_tokens) for n in range(1, count + 1)]
    await call.write(Connect(requests=requests))
    return call, Collected()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.01)


def assert_complete(collected: Collected, count: int, max_tokens: int) -> None:
    for number in range(1, count + 1):
        assert collected.token_ids[number] == output_of(number, max_tokens)
        assert collected.finish_reasons[number] == [common_pb2.FINISH_REASON_LENGTH]


def test_requests_go_where_the_fewest_run() -> None:
    line = PureLine(FakeExecutor(), FakeExecutor(), FakeExecutor())
    for number in range(6):
        line.add(prompt_of(number), max_tokens=5)
    for _ in range(3):
        for index in (2, 0, 1):
            line.schedule(index)
    assert [replica.num_running for replica in line.scheduler.replicas] == [2, 2, 2]
    line.run()
    assert all(line.outputs[number + 1] == output_of(number, 5) for number in range(6))


def test_who_finds_no_room_on_one_replica_runs_on_the_other() -> None:
    small, large = FakeExecutor(num_blocks=16, max_num_seqs=1), FakeExecutor()
    line = PureLine(small, large, max_model_len=256)
    for number in range(8):
        line.add(prompt_of(number, 60), max_tokens=5)
    for index in (0, 1):
        line.schedule(index)
    assert [replica.num_running for replica in line.scheduler.replicas] == [1, 7]
    line.run()
    for number in range(8):
        assert line.outputs[number + 1] == expected_output(prompt_of(number, 60), 5, vocab_size=VOCAB_SIZE)


def test_a_replica_that_computes_a_long_prompt_leaves_new_requests_to_others() -> None:
    line = PureLine(*(FakeExecutor(max_num_batched_tokens=64) for _ in range(2)))
    line.add(prompt_of(1, 3000), max_tokens=2)
    line.schedule(0)
    for number in range(2, 6):
        line.add(prompt_of(number), max_tokens=20)
    line.schedule(0)
    line.schedule(1)
    assert [replica.num_running for replica in line.scheduler.replicas] == [1, 4]
    line.run()


@pytest.mark.parametrize("other", [FakeExecutor(num_blocks=4), FakeExecutor(block_size=8), FakeExecutor(vocab_size=9)])
def test_executors_that_differ_in_what_a_request_may_be_do_not_mix(other: FakeExecutor) -> None:
    line = PureLine(FakeExecutor(), other, attach=False)
    line.attach(0)
    line.add(prompt_of(1, 100), max_tokens=50)
    with pytest.raises(NotInterchangeable, match="not used until they have left"):
        line.attach(1)
    line.run()
    assert line.outputs[1] == expected_output(prompt_of(1, 100), 50, vocab_size=VOCAB_SIZE)
    line.lose(0)
    line.attach(1)


def test_a_suspect_pauses_one_replica_not_all() -> None:
    line = PureLine(FakeExecutor(), FakeExecutor())
    for number in range(3):
        line.add(prompt_of(number), max_tokens=40)
    for index in (0, 1):
        line.schedule(index)
    (suspect,) = line.scheduler.replicas[1].running
    line.die(index=1)
    assert line.is_suspect(suspect)
    line.add(prompt_of(5), max_tokens=40)
    assert line.schedule(0) is not None, "the others go on"
    line.run()
    assert suspect.finish_reason is FinishReason.LENGTH


def test_an_undecided_step_says_nothing_about_the_queue() -> None:
    line = PureLine(FakeExecutor(), max_waiting_requests=1)
    line.add(prompt_of(0), max_tokens=9)
    line.schedule()
    line.schedule()
    for number in range(1, 5):
        line.add(prompt_of(number), max_tokens=9)
        assert line.schedule() is None, "two are in flight"
    line.run()


def test_no_draft_takes_a_block_that_another_request_needs() -> None:
    executor = FakeExecutor(num_blocks=6, block_size=4, max_draft_tokens=6)
    line = PureLine(executor, enable_prefix_caching=False)
    for number in range(2):
        line.add(prompt_of(number, 4), max_tokens=8)
    line.run()
    assert not line.replica.counts.num_preemptions, "three blocks each are just enough"


@pytest.mark.parametrize(
    "restriction",
    [
        {"grammar": common_pb2.Grammar(regex="a*")},
        {"thinking": common_pb2.Thinking(end=common_pb2.TokenSequence(token_ids=[1]), begun=True, budget=3)},
    ],
)
def test_what_may_follow_a_restricted_token_is_drafted_too(restriction: dict) -> None:
    line = PureLine(FakeExecutor(max_draft_tokens=4))
    restricted, free = line.add(prompt_of(1), max_tokens=20, **restriction), line.add(prompt_of(2), max_tokens=20)
    line.run()
    drafted = {step.sampled[index].request_id for step in line.steps for index in step.drafts_of}
    assert drafted == {restricted.request_id, free.request_id}
    assert line.outputs[restricted.request_id] == output_of(1, 20)


def test_vectors_and_tokens_share_a_step() -> None:
    line = PureLine(FakeExecutor(max_draft_tokens=2))
    vector = line.add(prompt_of(1), yields_vector=True)
    text = line.add(prompt_of(2), max_tokens=9)
    another = line.add(prompt_of(3), yields_vector=True)
    line.run()
    assert line.vectors.keys() == {vector.request_id, another.request_id}
    assert line.outputs[text.request_id] == output_of(2, 9)
    assert vector.finish_reason is another.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_last", [1, 2])
def test_a_vector_comes_with_the_last_piece_of_a_prompt(num_last: int) -> None:
    """However small it is: a single token looks like that of a decode."""
    prompt = prompt_of(1)
    line = PureLine(FakeExecutor(), max_num_batched_tokens=len(prompt) - num_last)
    vector = line.add(prompt, yields_vector=True)
    line.run()
    pieces = [step.num_scheduled_tokens for step in line.steps if step.request_ids]
    assert pieces == [[len(prompt) - num_last], [num_last]]
    assert line.vectors.keys() == {vector.request_id}


async def test_replicas_work_side_by_side(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, *executors(2)).running() as line:
        await line.wait_for_executors(2)
        call, collected = await submit(line, 8, 30)
        await collected.read_until_finished(call, *range(1, 9))
        assert_complete(collected, 8, 30)
        assert all(len(executor.new_requests) == 4 for executor in line.executors)
        load = await line.load()
        assert (load.num_executors, load.num_blocks, load.max_num_seqs) == (2, 512, 128)


async def test_requests_of_a_lost_replica_move_to_the_others_at_once(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, *executors(2)).running() as line:
        await line.wait_for_executors(2)
        call, collected = await submit(line, 6, 300)
        while line.executors[1].num_steps < 5:
            collected.add(await call.read())
        await line.kill_executor(1)
        await collected.read_until_finished(call, *range(1, 7))
        assert_complete(collected, 6, 300)
        assert {new.request_id for new in line.executors[0].new_requests} == set(range(1, 7)), "all ended there"
        await line.start_executor(index=1)
        await line.wait_for_executors(2)
        call, collected = await submit(line, 6, 5)
        await collected.read_until_finished(call, *range(1, 7))
        assert_complete(collected, 6, 5)


async def test_replicas_die_and_return_in_turn_without_notice(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, *executors(3, step_seconds=0.005)).running() as line:
        await line.wait_for_executors(3)
        call, collected = await submit(line, 9, 80)
        reading = asyncio.create_task(collected.read_until_finished(call, *range(1, 10)))
        for index in (0, 1, 2, 1):
            await asyncio.sleep(0.05)
            await line.kill_executor(index)
            await line.start_executor(index=index)
        await reading
        assert_complete(collected, 9, 80)
        await line.wait_until_free()


async def test_an_executor_of_another_model_waits_until_the_others_are_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line = ServiceLine(tmp_path, *executors(1), *executors(1, model="another"))
    await line.start_executor(index=0)
    async with line.running(with_executor=False):
        await line.wait_for_executors(1)
        await line.start_executor(index=1)
        await until(
            lambda: (
                "serves another with requests of up to 4096 tokens in blocks of 16, while others serve fake"
                in caplog.text
            )
        )
        assert (await line.load()).model_info.model == "fake"
        assert "lost the executor" not in caplog.text
        await line.kill_executor(0)
        await until(lambda: (info := line.engine.availability.info) is not None and info.model == "another")


async def test_a_step_gains_several_tokens_up_to_the_end(tmp_path: Path) -> None:
    tokens = output_of(1, 40)
    stop = next(token for token in tokens[20:] if tokens.index(token) >= 20)
    num_tokens = tokens.index(stop) + 1
    drafting = FakeExecutorServicer(lambda: FakeExecutor(max_draft_tokens=6, draw_gain=lambda most: most))
    async with ServiceLine(tmp_path, drafting).running() as line:
        request = generate_request(prompt_of(1), max_tokens=40, stop_token_ids=[stop], logprobs=1)
        responses = [response async for response in line.stub.Generate(request)]
        assert [t for r in responses for t in r.token_ids] == tokens[:num_tokens]
        assert [t for r in responses for t in r.logprobs.token_ids[::2]] == tokens[:num_tokens], "cut at the end, too"
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_STOP
        assert responses[-1].usage.completion_tokens == num_tokens
        assert drafting.num_steps < num_tokens / 2
        await line.wait_until_free()


async def test_a_request_may_yield_a_vector(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, *executors(1)).running() as line:
        request = generate_request(prompt_of(1, 3000))
        request.request.yields_vector = True
        (response,) = [response async for response in line.stub.Generate(request)]
        assert len(response.vector.values) == 1 and not response.token_ids
        assert response.finish_reason == common_pb2.FINISH_REASON_STOP
        assert response.usage.prompt_tokens == 3000 and response.usage.completion_tokens == 0
        call = line.link.Connect()
        await call.write(
            Connect(
                requests=[TokenSubmission(request=request.request), token_submission(5, prompt_of(5), max_tokens=4)]
            )
        )
        vectors: dict[int, list[float]] = {}
        collected = Collected()
        while not collected.finish_reasons.keys() >= {0, 5}:
            message = await call.read()
            collected.add(message)
            vectors |= {message.request_ids[i]: list(vector.values) for i, vector in message.vectors.items()}
        assert vectors == {0: list(response.vector.values)}
        assert collected.token_ids == {0: [], 5: output_of(5, 4)}
        await line.wait_until_free()


async def test_each_executor_is_named_once() -> None:
    for address in ("a:1,a:1", "a:1,", "a:1, a:1"):
        with pytest.raises(StartupError, match=r"--executor-address .*list each once"):
            await serve(SchedulerConfig(executor_address=address))


async def test_others_take_over_from_an_executor_that_hangs(tmp_path: Path) -> None:
    """The replica takes requests again when it goes on."""
    line = ServiceLine(tmp_path, *executors(2), hang_timeout=1)
    hangs = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.e2e.fake_executor",
        line.executor_addresses[0],
        "0",
        "0.01",
        cwd=Path(__file__).parents[4],
    )
    try:
        async with line.running(with_executor=False):
            await line.start_executor(FakeExecutorServicer(fake_executor.make_executor, step_seconds=0.01), index=1)
            await line.wait_for_executors(2)
            call, collected = await submit(line, 8, 200)
            await until(lambda: len(line.executors[1].executor.rows) == line.engine.scheduler.num_running - 4 == 4)
            os.kill(hangs.pid, signal.SIGSTOP)
            await collected.read_until_finished(call, *range(1, 9))
            for number in range(1, 9):
                assert collected.token_ids[number] == expected_output(
                    prompt_of(number), 200, vocab_size=fake_executor.VOCAB_SIZE
                )
            assert len(line.executors[1].new_requests) == 8
            os.kill(hangs.pid, signal.SIGCONT)
            await line.wait_for_executors(2)
    finally:
        hangs.kill()
        await hangs.wait()


async def test_an_executor_that_is_about_to_end_gets_no_new_requests(tmp_path: Path) -> None:
    """Requests that run there may end; the others go on elsewhere when it goes, and none becomes a suspect."""
    line = ServiceLine(tmp_path, *executors(2, step_seconds=0.005), hang_timeout=0.4)
    async with line.running():
        await line.wait_for_executors(2)
        call, collected = await submit(line, 4, 100)
        leaving, staying = line.executors
        await until(lambda: len(leaving.executor.rows) == len(staying.executor.rows) == 2)
        goes = asyncio.Event()
        draining = asyncio.create_task(line.drain_executor(goes.wait))
        await until(lambda: line.engine.scheduler.replicas[0].is_leaving)
        taken = len(leaving.new_requests)
        more = [asyncio.create_task(generate(line, number)) for number in range(5, 11)]
        for number, output in zip(range(5, 11), await asyncio.gather(*more), strict=True):
            assert output == output_of(number, 10)
        assert len(leaving.new_requests) == taken
        assert len(leaving.executor.rows) == 2, "they run on where they are"
        goes.set()
        await draining
        await collected.read_until_finished(call, 1, 2, 3, 4)
        assert_complete(collected, 4, 100)
        assert len(staying.new_requests) == 2 + 6 + 2
        await line.start_executor(FakeExecutorServicer(FakeExecutor, step_seconds=0.005))
        await line.wait_for_executors(2)
        assert not line.engine.scheduler.replicas[0].is_leaving


async def test_the_last_executor_works_until_it_ends(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, *executors(2), hang_timeout=0.4)
    async with line.running():
        await line.wait_for_executors(2)
        await line.kill_executor(1)
        await line.wait_for_executors(1)
        goes = asyncio.Event()
        draining = asyncio.create_task(line.drain_executor(goes.wait))
        await until(lambda: line.engine.scheduler.replicas[0].is_leaving)
        assert await generate(line, 1) == output_of(1, 10)
        goes.set()
        await draining


async def test_no_request_is_suspected_because_executors_are_replaced(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, *executors(1, step_seconds=600), hang_timeout=0.4)
    async with line.running():
        await line.wait_for_executors(1)
        generating = asyncio.create_task(generate(line, 1))
        for _ in range(MAX_SILENT_LOSSES):
            await until(lambda: line.engine.scheduler.num_running == 1)
            goes = asyncio.Event()
            draining = asyncio.create_task(line.drain_executor(goes.wait))
            await until(lambda: line.engine.scheduler.replicas[0].is_leaving)
            goes.set()
            await draining
            await line.start_executor(executors(1, step_seconds=600)[0])
        await line.kill_executor()
        await line.start_executor(executors(1)[0])
        assert await generating == output_of(1, 10)


async def generate(line: ServiceLine, number: int) -> list[int]:
    request = generate_request(prompt_of(number), max_tokens=10)
    return [token_id async for response in line.stub.Generate(request) for token_id in response.token_ids]

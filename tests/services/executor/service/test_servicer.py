"""ExecutorService over a real unix socket, with a tiny model behind it."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest

from pagewire.config import ExecutorConfig
from pagewire.services.executor.batch.kv_cache import KVGroup
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service.session import Session
from pagewire.services.executor.service.worker import Worker
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.startup import start_runner
from pagewire.services.executor.step.step import Step, StepOutput
from pagewire.telemetry import metrics
from pagewire.v1 import common_pb2, executor_pb2, executor_pb2_grpc
from pagewire.wire import rpc
from tests.services.executor.helpers.servicers import servicer_of
from tests.services.executor.helpers.stepping import BLOCK_SIZE, CPU, LIMITS, BrokenRunner, alone, prompt, tiny_llama

NUM_BLOCKS = 24
GREEDY = common_pb2.SamplingParams(temperature=0)
INFO = ExecutorInfo(
    incarnation=2**63 + 5,
    model="tiny",
    max_model_len=96,
    vocab_size=200,
    eos_token_ids=(2,),
    kv_groups=(KVGroup(NUM_BLOCKS, 0),),
    block_size=BLOCK_SIZE,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    device="cpu",
    dtype="float32",
    weight_bytes=1000,
    kv_cache_bytes=2000,
)
Call: TypeAlias = grpc.aio.StreamStreamCall


@dataclass
class Service:
    worker: Worker
    server: rpc.Server
    stub: executor_pb2_grpc.ExecutorServiceStub


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        yield f"unix:{directory}/executor.sock"


@asynccontextmanager
async def serving(
    address: str, start: Callable[[], tuple[ModelRunner, ExecutorInfo]], *, wait: bool = True
) -> AsyncIterator[Service]:
    worker = Worker(start, on_cuda=False)
    server = rpc.Server([address], shutdown_timeout=1.0)
    server.add(
        servicer_of(worker, ExecutorConfig()),
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server,
        "pagewire.v1.ExecutorService",
    )
    await server.start()
    worker.start()
    loaded = asyncio.wrap_future(worker.loaded)
    try:
        if wait:
            await asyncio.shield(loaded)
            await server.set_serving(True)
        async with rpc.channel(address) as channel:
            yield Service(worker, server, executor_pb2_grpc.ExecutorServiceStub(channel))
    finally:
        await server.stop()
        if wait:  # even when cancelled: a runner that is being made would take the model from the next one
            await asyncio.wait([loaded])
        worker.stop()


@pytest.fixture
async def service(socket: str, model: Model) -> AsyncIterator[Service]:
    async with serving(socket, lambda: (assemble(model, LIMITS, NUM_BLOCKS, CPU), INFO)) as service:
        yield service


def first_step(
    token_ids: list[int], request_id: int = 7, params: common_pb2.SamplingParams = GREEDY
) -> executor_pb2.StepRequest:
    """Step 1: one new request, its whole prompt, blocks for up to 40 tokens."""
    return executor_pb2.StepRequest(
        step_id=1,
        new_requests=[
            executor_pb2.NewRequest(
                request_id=request_id,
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids),
                blocks=[executor_pb2.Blocks(ids=[4, 2, 9, 1, 17])],
                sampling_params=params,
            )
        ],
        request_ids=[request_id],
        num_scheduled_tokens=[len(token_ids)],
        num_new_blocks=[0],
    )


def next_step(step_id: int, request_id: int = 7) -> executor_pb2.StepRequest:
    return executor_pb2.StepRequest(
        step_id=step_id, request_ids=[request_id], num_scheduled_tokens=[1], num_new_blocks=[0]
    )


async def opened(service: Service, term: int = 0) -> Call:
    """Returns a stream after the answer to its opening message."""
    call = service.stub.Execute()
    await call.write(executor_pb2.StepRequest(term=term))
    assert (await call.read()) == executor_pb2.StepResult()
    return call


async def generate(call: Call, num_tokens: int, token_ids: list[int]) -> list[int]:
    """Two steps in flight, as the scheduler keeps them."""
    await call.write(first_step(token_ids))
    tokens = []
    for step_id in range(2, num_tokens + 2):
        if step_id <= num_tokens:
            await call.write(next_step(step_id))
        result = await call.read()
        assert (result.step_id, list(result.request_ids), list(result.num_tokens)) == (step_id - 1, [7], [1])
        assert result.execute_ns > 0
        tokens += result.token_ids
    return tokens


async def rest_of(call: Call) -> list[executor_pb2.StepResult]:
    """Results up to the end of the stream."""
    results = []
    while (result := await call.read()) is not grpc.aio.EOF:
        results.append(result)
    return results


async def error_of(call: Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return caught.value


async def test_describe(service: Service):
    described = await service.stub.Describe(executor_pb2.DescribeRequest())
    assert described.incarnation == 2**63 + 5
    assert described.model_info == common_pb2.ModelInfo(
        model="tiny", max_model_len=96, vocab_size=200, eos_token_ids=[2], max_logprobs=20
    )
    assert list(described.kv_groups) == [executor_pb2.KVGroup(num_blocks=NUM_BLOCKS)]
    assert (described.block_size, described.device) == (BLOCK_SIZE, "cpu")


async def test_a_request_through_the_stream(service: Service, model: Model):
    call = await opened(service)
    tokens = await generate(call, 10, prompt(9))
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK
    assert tokens == alone(model, prompt(9), 10)


async def test_a_late_step_reports_how_long_the_device_was_idle(service: Service):
    call = await opened(service)
    await call.write(first_step(prompt(9)))
    first = await call.read()
    await asyncio.sleep(0.05)
    await call.write(next_step(2))
    second = await call.read()
    assert not first.HasField("idle_ns"), "nothing was before it"
    assert second.idle_ns > 0.04e9, "while nothing was in the queue"


async def test_steps_that_lie_ready_find_no_idle_device(
    socket: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_are_there = threading.Event()

    class PatientRunner(ModelRunner):
        def execute(self, step: Step, launching: Callable[[float], None] = lambda load: None) -> StepOutput:
            assert all_are_there.wait(30)
            return super().execute(step, launching)

    async with serving(socket, lambda: (PatientRunner(model, LIMITS, NUM_BLOCKS, CPU), INFO)) as service:
        submit = service.worker.submit

        def submit_and_tell(session: Session, step: Step) -> None:
            submit(session, step)
            if step.step_id == 5:
                all_are_there.set()

        monkeypatch.setattr(service.worker, "submit", submit_and_tell)
        call = await opened(service)
        await call.write(first_step(prompt(9)))
        for step_id in range(2, 6):
            await call.write(next_step(step_id))
        await call.done_writing()
        assert [result.idle_ns for result in await rest_of(call)] == [0] * 5


async def test_results_of_submitted_steps_come_before_the_end(service: Service):
    call = await opened(service)
    await call.write(first_step(prompt(9)))
    await call.write(next_step(2))
    await call.done_writing()
    assert [result.step_id for result in await rest_of(call)] == [1, 2]


async def test_memory_is_given_back_after_large_steps(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    returned = threading.Event()
    monkeypatch.setattr("pagewire.services.executor.service.servicer.LARGE_STEP", 8)
    monkeypatch.setattr("pagewire.process.memory_return.release_unused_memory", returned.set)
    monkeypatch.setattr("pagewire.process.memory_return._QUIET_S", 0.01)
    call = await opened(service)
    await generate(call, 3, prompt(8))
    await asyncio.sleep(0.1)
    assert not returned.is_set(), "small steps need no more than they did before"
    await generate(await opened(service), 3, prompt(9))
    assert await asyncio.to_thread(returned.wait, 10)


async def test_logprobs_and_defaults_on_the_wire(service: Service):
    call = await opened(service)
    params = common_pb2.SamplingParams(seed=-3, logprobs=2)
    await call.write(first_step(prompt(9), params=params))
    result = await call.read()
    logprobs = result.logprobs[0]
    assert logprobs.entries_per_token == 3
    assert len(logprobs.token_ids) == len(logprobs.logprobs) == 3 and len(logprobs.ranks) == 1
    assert logprobs.token_ids[0] == result.token_ids[0]
    assert logprobs.logprobs[1] >= logprobs.logprobs[2]


async def test_a_new_stream_supersedes_the_old_one_and_starts_empty(service: Service, model: Model):
    old = await opened(service)
    await old.write(first_step(prompt(9)))
    assert (await old.read()).step_id == 1
    new = await opened(service)
    assert await generate(new, 5, prompt(12)) == alone(model, prompt(12), 5), "request 7 is free again"
    error = await error_of(old)
    assert error.code() == grpc.StatusCode.ABORTED and "superseded" in (error.details() or "")
    await new.write(next_step(6))
    assert (await new.read()).step_id == 6, "the end of the old stream leaves the new one alone"


async def test_a_scheduler_of_a_lower_term_is_refused_and_changes_nothing(service: Service, model: Model):
    ours = await opened(service, term=5)
    for term in (4, 0):
        refused = service.stub.Execute()
        await refused.write(executor_pb2.StepRequest(term=term))
        error = await error_of(refused)
        assert error.code() == grpc.StatusCode.FAILED_PRECONDITION and "term 5" in (error.details() or "")
    assert await generate(ours, 5, prompt(9)) == alone(model, prompt(9), 5)
    later = await opened(service, term=6)
    assert (await error_of(ours)).code() == grpc.StatusCode.ABORTED
    assert await generate(later, 5, prompt(9)) == alone(model, prompt(9), 5)


async def test_a_term_ends_some_time_after_its_stream(service: Service, model: Model, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pagewire.services.executor.service.servicer.TERM_HELD_S", 0.3)
    later = await opened(service, term=6)
    later.cancel()
    await asyncio.sleep(0.05)
    refused = service.stub.Execute()
    await refused.write(executor_pb2.StepRequest(term=5))
    assert (await error_of(refused)).code() == grpc.StatusCode.FAILED_PRECONDITION, "it may be back in a moment"
    await asyncio.sleep(0.3)
    assert await generate(await opened(service, term=5), 3, prompt(9)) == alone(model, prompt(9), 3)


async def test_a_stream_begins_with_its_opening_message(service: Service):
    call = service.stub.Execute()
    await call.write(first_step(prompt(9)))
    error = await error_of(call)
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION and "begins with step_id 0" in (error.details() or "")


async def test_a_cancelled_stream_leaves_room_for_the_next(service: Service, model: Model):
    for _ in range(3):
        call = await opened(service)
        await call.write(first_step(prompt(9)))
        await call.read()
        call.cancel()
    assert await generate(await opened(service), 3, prompt(9)) == alone(model, prompt(9), 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (next_step(2, request_id=8), "unknown request 8"),
        (next_step(3), "step 3 follows step 1"),
        (next_step(1), "step 1 follows step 1"),
        (executor_pb2.StepRequest(step_id=2, request_ids=[7]), "1 request_ids, 0 num_scheduled_tokens"),
        (executor_pb2.StepRequest(step_id=2, finished_request_ids=[1]), "unknown request 1"),
        (
            executor_pb2.StepRequest(step_id=2, new_requests=[executor_pb2.NewRequest(request_id=3, token_ids=[5])]),
            "new request 3 samples with temperature 1 but has no seed",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_misuse_ends_the_stream_and_nothing_else(
    service: Service, model: Model, wrong: executor_pb2.StepRequest, message: str
):
    call = await opened(service)
    await call.write(first_step(prompt(9)))
    await call.read()
    await call.write(wrong)
    error = await error_of(call)
    assert error.code() == grpc.StatusCode.INTERNAL
    assert message in (error.details() or "")
    assert await generate(await opened(service), 3, prompt(9)) == alone(model, prompt(9), 3)
    assert not service.worker.failed.done()


async def test_calls_wait_until_the_model_is_loaded(socket: str, model: Model):
    may_load = threading.Event()

    def start() -> tuple[ModelRunner, ExecutorInfo]:
        may_load.wait(10)
        return assemble(model, LIMITS, NUM_BLOCKS, CPU), INFO

    async with serving(socket, start, wait=False) as service:
        impatient, described = (service.stub.Describe(executor_pb2.DescribeRequest()) for _ in range(2))
        call = service.stub.Execute()
        for message in (executor_pb2.StepRequest(), first_step(prompt(9)), next_step(2)):
            await call.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await service.stub.Describe(executor_pb2.DescribeRequest(), timeout=0.2)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        impatient.cancel()
        assert not described.done() and not service.worker.loaded.done()
        may_load.set()
        assert (await described).model_info.model == "tiny"
        results = [await call.read() for _ in range(3)]
        assert [token for result in results for token in result.token_ids] == alone(model, prompt(9), 2)


async def test_a_model_that_does_not_load_says_why(socket: str):
    may_fail = threading.Event()

    def start() -> tuple[ModelRunner, ExecutorInfo]:
        may_fail.wait(10)
        raise ValueError("no such tensor")

    async with serving(socket, start, wait=False) as service:
        calls = [service.stub.Describe(executor_pb2.DescribeRequest()), service.stub.Execute().read()]
        may_fail.set()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.INTERNAL
            assert "the model could not be loaded: no such tensor" in (caught.value.details() or "")
        with pytest.raises(ValueError, match="no such tensor"):
            await asyncio.wrap_future(service.worker.loaded)


async def test_a_fatal_device_error_fails_the_stream_and_is_reported(socket: str, model: Model):
    async with serving(socket, lambda: (BrokenRunner(model, LIMITS, NUM_BLOCKS, CPU), INFO)) as service:
        call = await opened(service)
        await call.write(first_step(prompt(9)))
        await call.write(next_step(2))
        assert (await call.read()).step_id == 1
        error = await error_of(call)
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "unspecified launch failure" in (error.details() or "")
        with pytest.raises(DeviceError, match="unspecified launch failure"):
            await asyncio.wrap_future(service.worker.failed)
        # A stream that this process took now would end with it, and its requests would look guilty.
        assert (await error_of(service.stub.Execute())).code() == grpc.StatusCode.UNAVAILABLE


async def test_an_error_of_the_device_in_a_result_is_fatal(socket: str, model: Model):
    """A fixed prompt would pass, and what follows would be wrong all the same."""
    async with serving(socket, lambda: (assemble(model, LIMITS, NUM_BLOCKS, CPU), INFO)) as service:
        call = await opened(service)
        await call.write(first_step(prompt(9)))
        assert (await call.read()).step_id == 1
        session = service.worker._session
        assert session is not None
        # As the thread that waits for results does on CUDA.
        service.worker._report_failure(session, DeviceError("kernels left 2 counters of split work behind"))
        assert "2 counters" in ((await error_of(call)).details() or "")
        with pytest.raises(DeviceError, match="2 counters of split work"):
            await asyncio.wrap_future(service.worker.failed)


async def test_metrics_are_there(service: Service):
    await generate(await opened(service), 4, prompt(9))
    text = metrics.exposition()
    assert 'pagewire:executor_steps_total{kind="prefill"}' in text
    assert 'pagewire:executor_steps_total{kind="decode"}' in text
    assert "pagewire:executor_step_seconds_bucket" in text and "pagewire:executor_step_tokens_sum" in text


@pytest.mark.slow
async def test_the_real_model_knows_the_capital_of_france(socket: str, smollm2_gguf: Path):
    from gguf import GGUFReader

    tokens = GGUFReader(smollm2_gguf).fields["tokenizer.ggml.tokens"].contents()
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    words = ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]
    config = ExecutorConfig(dtype="float32", max_model_len=512, kv_cache_memory_bytes=2**26, block_size=BLOCK_SIZE)
    async with serving(socket, lambda: start_runner(config, str(smollm2_gguf), lambda fraction, text: None)) as service:
        described = await service.stub.Describe(executor_pb2.DescribeRequest())
        assert (described.model_info.max_model_len, described.dtype) == (512, "float32")
        generated = await generate(await opened(service), 8, [ids[word] for word in words])
    assert ids["ĠParis"] in generated, "".join(tokens[token_id] for token_id in generated)

"""Weights are replaced while requests run: the weights of each request, and executors that crash during it."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc
import pytest

from pagewire.services.scheduler.weights import rollout
from pagewire.v1 import admin_pb2, admin_pb2_grpc, common_pb2
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest, TokenSubmission
from pagewire.wire.admin import Neighbour
from pagewire.wire.behind import replace_behind
from pagewire.wire.rpc import RpcError
from tests.fakes import FakeExecutor, FakeExecutorServicer, expected_output
from tests.services.scheduler.service_line import Collected, ServiceLine, generate_request, token_submission

VOCAB_SIZE = 1000
FILES = {"a": "old", "b": "new", "c": "newer"}
LENGTH = common_pb2.FINISH_REASON_LENGTH


def prompt_of(number: int, length: int = 20) -> list[int]:
    return [(number * 101 + i) % VOCAB_SIZE for i in range(length)]


def output_of(number: int, max_tokens: int, version: str) -> list[int]:
    return expected_output(prompt_of(number), max_tokens, vocab_size=VOCAB_SIZE, weights_version=version)


def executor(*, step_seconds: float = 0.002) -> FakeExecutorServicer:
    """An executor that starts with the weights "old" of "a", and may load those of "b" and "c"."""
    return FakeExecutorServicer(
        FakeExecutor, model="a", step_seconds=step_seconds, weights_version="old", checkpoints=dict(FILES)
    )


@pytest.fixture(autouse=True)
def _tokenizers_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a rollout that does not wait for resubmitted requests."""
    monkeypatch.setattr(rollout, "RESUBMITTED_S", 0.0)


class Clients:
    """Requests on one stream, and their outputs."""

    def __init__(self, line: ServiceLine) -> None:
        self.call = line.link.Connect()
        self.collected = Collected()

    async def submit(self, numbers: Sequence[int], max_tokens: int, grammar: str = "", **submission: object) -> None:
        """Submits a request. grammar: a regex."""
        requests = [token_submission(n, prompt_of(n), max_tokens=max_tokens) for n in numbers]
        for request in requests:
            request.MergeFrom(TokenSubmission(**submission))  # type: ignore[arg-type]
            if grammar:
                request.request.sampling_params.grammar.regex = grammar
        await self.call.write(SchedulerLinkServiceConnectRequest(requests=requests))

    async def until(self, number: int, num_tokens: int) -> None:
        """Waits until the request has so many tokens."""
        async with asyncio.timeout(10):
            while len(self.collected.token_ids.get(number, [])) < num_tokens:
                self.collected.add(await self.call.read())

    async def end(self, *numbers: int) -> None:
        await self.collected.read_until_finished(self.call, *numbers)

    def version_of(self, number: int) -> str:
        return self.collected.weights_versions[number]

    def assert_whole(self, number: int, max_tokens: int) -> None:
        """Checks that all of its tokens are of the version that was reported to it."""
        assert self.collected.token_ids[number] == output_of(number, max_tokens, self.version_of(number))
        assert self.collected.finish_reasons[number] == [LENGTH]


def replacing(
    line: ServiceLine, model: str = "b", version: str = "", max_wait: float | None = None, request_id: str = ""
) -> asyncio.Task[admin_pb2.ReplaceWeightsResponse]:
    request = admin_pb2.ReplaceWeightsRequest(
        model=model, version=version, max_wait_seconds=max_wait, request_id=request_id
    )
    stub = admin_pb2_grpc.AdminServiceStub(line.channel)

    async def replace() -> admin_pb2.ReplaceWeightsResponse:
        async with asyncio.timeout(15):
            return await stub.ReplaceWeights(request)

    return asyncio.create_task(replace())


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while True:
            if is_so():
                return
            await asyncio.sleep(0.005)


async def until_draining(line: ServiceLine) -> None:
    await until(lambda: line.engine.scheduler.replicas[0].is_draining)


async def test_running_requests_end_on_the_old_weights_and_later_ones_get_the_new(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        clients = Clients(line)
        await clients.submit([1, 2], 60)
        await clients.until(1, 5)
        replaced = replacing(line)
        await until_draining(line)
        await clients.submit([3], 30)
        await clients.end(1, 2, 3)
        answer = await replaced
        assert (answer.previous_version, answer.version, answer.num_executors) == ("old", "new", 1)
        assert [clients.version_of(number) for number in (1, 2, 3)] == ["old", "old", "new"]
        for number, max_tokens in ((1, 60), (2, 60), (3, 30)):
            clients.assert_whole(number, max_tokens)
        await line.wait_until_free()


async def test_the_format_of_blocks_is_known_after_a_replacement(tmp_path: Path) -> None:
    """An executor keeps blocks only in a format that it has told."""
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        info = line.engine.scheduler.info
        assert info is not None and info.kv_format == "fake old"
        await replacing(line)
        info = line.engine.scheduler.info
        assert info is not None and info.kv_format == f"fake {line.executor.weights.digest}" != "fake old"
        assert info.weights.version == "new"


async def test_a_stream_of_requests_loses_none(tmp_path: Path) -> None:
    """Two executors switch one after the other, and the other one takes requests at that time."""
    async with ServiceLine(tmp_path, executor(), executor()).running() as line:
        await line.wait_for_executors(2)
        clients = Clients(line)
        replaced: asyncio.Task[admin_pb2.ReplaceWeightsResponse] | None = None
        for number in range(1, 61):
            await clients.submit([number], 5 + number % 20)
            if number == 15:
                replaced = replacing(line)
            await asyncio.sleep(0.005)
        await clients.end(*range(1, 61))
        assert replaced is not None
        assert (await replaced).num_executors == 2
        for number in range(1, 61):
            clients.assert_whole(number, 5 + number % 20)
        assert clients.version_of(1) == "old"
        await clients.submit([100, 101], 4)
        await clients.end(100, 101)
        assert {clients.version_of(100), clients.version_of(101)} == {"new"}


async def test_equal_prompts_share_no_blocks_across_versions(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        prompt = prompt_of(7, 64)

        async def generated() -> tuple[str, int]:
            responses = [r async for r in line.stub.Generate(generate_request(prompt, max_tokens=3))]
            return responses[0].weights_version, responses[-1].usage.cached_tokens

        assert await generated() == ("old", 0)
        assert await generated() == ("old", 48)
        await replacing(line)
        assert await generated() == ("new", 0)
        assert await generated() == ("new", 48)


async def test_weights_that_one_executor_cannot_load_replace_none(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor(), executor())
    line.executors[1].checkpoints = {}
    async with line.running():
        await line.wait_for_executors(2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await replacing(line)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no weights b" in (caught.value.details() or "")
        assert [one.weights.version for one in line.executors] == ["old", "old"]
        assert line.executors[0].loaded_weights is None  # its memory is free again
        clients = Clients(line)
        await clients.submit([1], 10)
        await clients.end(1)
        assert clients.version_of(1) == "old"


async def test_an_executor_that_dies_as_it_loads_weights_is_named_as_the_cause(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        line.executor.may_load.clear()
        replaced = replacing(line)
        async with asyncio.timeout(5):
            while not line.executor.num_loads:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await line.kill_executor()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await replaced
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "an executor was lost while it loaded the weights" in (caught.value.details() or "")
    assert "the old weights remain in force, try again" in (caught.value.details() or "")


async def test_executors_that_find_different_files_keep_what_they_have(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor(), executor())
    line.executors[1].checkpoints = {"b": "other"}
    async with line.running():
        await line.wait_for_executors(2)
        with pytest.raises(grpc.aio.AioRpcError, match="different weights"):
            await replacing(line)
        assert [one.weights.version for one in line.executors] == ["old", "old"]


@pytest.mark.parametrize(
    ("request_fields", "problem"),
    [
        ({"model": ""}, "model is empty"),
        ({"model": "b", "version": "a b"}, "letters, digits"),
        ({"model": "b", "max_wait_seconds": -1.0}, "0 or more"),
        ({"model": "b", "request_id": "é" * 33}, "longer than 64 bytes"),
    ],
)
async def test_a_wrong_order_is_refused(tmp_path: Path, request_fields: dict[str, object], problem: str) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        with pytest.raises(grpc.aio.AioRpcError, match=problem):
            request = admin_pb2.ReplaceWeightsRequest(**request_fields)  # type: ignore[arg-type]
            await admin_pb2_grpc.AdminServiceStub(line.channel).ReplaceWeights(request)


async def test_the_same_weights_again_change_nothing(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        await replacing(line)
        num_streams = line.executor.num_streams
        assert (await replacing(line)).version == "new"
        assert line.executor.num_streams == num_streams
        assert (await replacing(line, version="step-2")).version == "step-2"
        assert line.executor.weights.version == "step-2"


async def test_a_repeated_call_joins_its_replacement_or_gets_its_answer(tmp_path: Path) -> None:
    """A gateway repeats a call when a tokenizer service dies. Another call for the same weights loads them again."""
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        line.executor.may_load.clear()
        lost = replacing(line, request_id="1")
        await until(lambda: line.executor.num_loads)
        lost.cancel()
        joins = replacing(line, request_id="1")
        line.executor.may_load.set()
        first, num_loads = await joins, line.executor.num_loads
        assert (first.previous_version, first.version) == ("old", "new")
        assert await replacing(line, request_id="1") == first and line.executor.num_loads == num_loads
        with pytest.raises(grpc.aio.AioRpcError, match="use a new one"):
            await replacing(line, "c", request_id="1")
        for number, request_id in enumerate(["2", "", ""], num_loads + 1):
            again = await replacing(line, request_id=request_id)
            assert (again.previous_version, line.executor.num_loads) == ("new", number)


async def test_a_failed_replacement_can_be_repeated(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        with pytest.raises(grpc.aio.AioRpcError):
            await replacing(line, "missing", request_id="1")
        line.executor.checkpoints = {"missing": "new"}
        assert (await replacing(line, "missing", request_id="1")).version == "new"


async def test_one_replacement_at_a_time(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        line.executor.may_load.clear()
        first = replacing(line)
        await until(lambda: line.executor.num_loads)
        with pytest.raises(grpc.aio.AioRpcError, match="already"):
            await replacing(line, "c")
        again = replacing(line)  # as after the death of a service in between
        line.executor.may_load.set()
        assert [(await one).version for one in (first, again)] == ["new", "new"]


async def test_who_takes_too_long_ends_with_a_reason(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        clients = Clients(line)
        await clients.submit([1], 3000)
        await clients.until(1, 3)
        replaced = replacing(line, max_wait=0.0)
        await clients.end(1)
        assert (await replaced).version == "new"
        assert clients.collected.errors[1].code == grpc.StatusCode.ABORTED.value[0]
        assert "max_wait_seconds" in clients.collected.errors[1].message


async def test_a_death_meanwhile_gives_no_request_more_time(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        clients = Clients(line)
        await clients.submit([1], 3000)
        await clients.until(1, 3)
        replaced = replacing(line, max_wait=0.5)
        await until_draining(line)
        await line.kill_executor()
        await line.wait_for_executor(False)
        await line.start_executor(executor())
        await clients.end(1)
        assert (await replaced).version == "new"
        assert "max_wait_seconds" in clients.collected.errors[1].message


async def test_a_request_that_loses_its_weights_while_its_grammar_is_compiled_fails(
    tmp_path: Path,
) -> None:
    async with ServiceLine(tmp_path, executor(), recovery_timeout=1.0).running() as line:
        await line.wait_for_executors(1)
        clients = Clients(line)
        await clients.submit([1], 40, "slow", resume_token_ids=[5], resubmitted=True, weights_version="old")
        await until(lambda: line.executor.grammars)
        assert (await replacing(line)).version == "new"
        line.executor.released.set()
        await clients.end(1)
        assert "which were replaced" in clients.collected.errors[1].message


async def test_an_executor_that_died_comes_back_to_the_new_weights(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        await replacing(line, version="step-1")
        await line.kill_executor()
        await line.wait_for_executor(False)
        await line.start_executor(executor())
        clients = Clients(line)
        await clients.submit([1], 5)
        await clients.end(1)
        assert clients.version_of(1) == "step-1"
        clients.assert_whole(1, 5)


async def test_an_executor_that_dies_as_it_goes_over_comes_back_to_the_new_weights(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        line.executor.may_install.clear()
        replaced = replacing(line)
        await line.wait_for_executor(False)
        await line.kill_executor()
        await line.start_executor(executor())
        assert (await replaced).num_executors == 1
        assert line.executor.weights.version == "new"


async def test_who_ran_on_an_executor_that_died_goes_on_with_its_weights(tmp_path: Path) -> None:
    """The successor starts with weights that are neither those of the request nor the target."""
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        await replacing(line, "b")
        clients = Clients(line)
        await clients.submit([1], 200)
        await clients.until(1, 5)
        replaced = replacing(line, "c")
        await until_draining(line)
        await line.kill_executor()
        await line.start_executor(executor())
        await clients.end(1)
        assert (await replaced).version == "newer"
        assert clients.version_of(1) == "new"
        clients.assert_whole(1, 200)
        assert line.executor.num_loads == 2  # those of the request, then the latest


async def test_a_new_scheduler_learns_of_the_weights_and_ends_what_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two executors has switched when the scheduler crashes; the request of the other one is not lost."""
    first = ServiceLine(tmp_path, executor(), executor(), name="s1")
    async with first.running():
        await first.wait_for_executors(2)
        clients = Clients(first)
        await clients.submit([1], 20)
        await clients.submit([2], 3000)
        await clients.until(2, 3)
        replaced = replacing(first)
        await until(lambda: first.executors[0].weights.version == "new")
        await clients.until(2, 30)
        begun = clients.collected.token_ids[2]
        replaced.cancel()
    monkeypatch.setattr(rollout, "RESUBMITTED_S", 2.0)
    second = ServiceLine(tmp_path, *first.executors, name="s2")
    async with second.running():
        await second.wait_for_executors(2)  # the tokenizer service is not that quick
        clients = Clients(second)
        await clients.submit([2], len(begun) + 40, resume_token_ids=begun, resubmitted=True, weights_version="old")
        await clients.submit([3], 40)
        await clients.end(2, 3)
        assert begun + clients.collected.token_ids[2] == output_of(2, len(begun) + 40, "old")
        clients.assert_whole(3, 40)
        await until(lambda: second.executors[1].weights.version == "new")


async def test_requests_of_a_tokenizer_service_that_dies_find_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        clients = Clients(line)
        await clients.submit([1], 3000)
        await clients.until(1, 5)
        begun = clients.collected.token_ids[1]
        replaced = replacing(line)
        await until_draining(line)
        monkeypatch.setattr(rollout, "RESUBMITTED_S", 2.0)
        clients.call.cancel()
        await until(lambda: not line.engine.scheduler.num_running)
        clients = Clients(line)
        await clients.submit([1], len(begun) + 40, resume_token_ids=begun, resubmitted=True, weights_version="old")
        await clients.end(1)
        assert begun + clients.collected.token_ids[1] == output_of(1, len(begun) + 40, "old")
        assert (await replaced).version == "new"


async def test_a_request_without_its_weights_ends_with_an_error(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor()).running() as line:
        await line.wait_for_executors(1)
        clients = Clients(line)
        await clients.submit([1], 40, resume_token_ids=[5], resubmitted=True, weights_version="long-gone")
        await clients.end(1)
        assert clients.collected.errors[1].code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert "long-gone" in clients.collected.errors[1].message


async def test_executors_that_start_with_different_weights_are_not_mixed(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor(), executor())
    line.executors[1].weights.version = line.executors[1].weights.digest = "damaged"
    async with line.running():
        await line.wait_for_executors(1)
        await until(lambda: max(one.num_descriptions for one in line.executors) >= 2)  # the second one
        assert (await line.load()).num_executors == 1


async def test_status_reports_the_weights_of_each_executor(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor(), executor()).running() as line:
        await line.wait_for_executors(2)
        clients = Clients(line)
        await clients.submit([1, 2], 3000)
        await clients.until(1, 2)
        await clients.until(2, 2)
        replaced = replacing(line, max_wait=3600)
        await until_draining(line)
        stub = admin_pb2_grpc.AdminServiceStub(line.channel)
        replicas = (await stub.GetStatus(admin_pb2.GetStatusRequest())).services[0].scheduler.replicas
        assert [(r.weights_version, r.is_replacing_weights) for r in replicas] == [("old", True), ("old", False)]
        replaced.cancel()


async def test_those_of_several_schedulers_are_replaced_by_one_call(tmp_path: Path) -> None:
    """Replaces weights as a tokenizer service with several schedulers does."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first, second = (ServiceLine(tmp_path / name, executor()) for name in ("1", "2"))
    async with first.running(), second.running():
        await first.wait_for_executors(1)
        await second.wait_for_executors(1)
        neighbours = [Neighbour("scheduler", line.scheduler_address, line.channel) for line in (first, second)]
        replace = replace_behind(lambda: neighbours)
        replaced = await replace(admin_pb2.ReplaceWeightsRequest(model="b"))
        assert (replaced.version, replaced.previous_version, replaced.num_executors) == ("new", "old", 2)
        second.executor.checkpoints = {"a": "old", "b": "new"}
        with pytest.raises(RpcError, match=f"weights newer are in use only at {first.scheduler_address}") as caught:
            await replace(admin_pb2.ReplaceWeightsRequest(model="c"))
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
        second.executor.checkpoints = FILES
        assert (await replace(admin_pb2.ReplaceWeightsRequest(model="c"))).num_executors == 2
        neighbours.clear()
        with pytest.raises(RpcError, match="no scheduler is available"):
            await replace(admin_pb2.ReplaceWeightsRequest(model="a"))

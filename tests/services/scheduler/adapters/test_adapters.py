"""Adapters in the service: names, loading on all executors, pinned contents, recovery."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.services.scheduler.adapters import adapters as module
from pagewire.services.scheduler.adapters import names as names_module
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest, TokenSubmission
from tests.fakes import FakeExecutor, FakeExecutorServicer, expected_output
from tests.services.scheduler.service_line import Collected, ServiceLine, generate_request, token_submission

VOCAB = 1000
FILES = {"/a": "aa", "/b": "bb", "/bad": "bad"}
DIRECTORY = {"/ad/unfit": "bad", "/ad/found": "ff"}


def executor(
    adapters: Mapping[str, str] | None = None, *, files: Mapping[str, str] = FILES, **options: Any
) -> FakeExecutorServicer:
    return FakeExecutorServicer(
        lambda: FakeExecutor(max_adapters=2), adapters=adapters, adapter_files=dict(files), **options
    )


def output(digest: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 5) -> list[int]:
    return expected_output(prompt, max_tokens, vocab_size=VOCAB, adapter_digest=digest)


async def generate(line: ServiceLine, adapter: str) -> list[int]:
    token_ids: list[int] = []
    async for response in line.stub.Generate(generate_request([1, 2, 3], adapter=adapter, max_tokens=5)):
        token_ids += response.token_ids
    return token_ids


async def generate_linked(line: ServiceLine, *submissions: TokenSubmission) -> Collected:
    call, collected = line.link.Connect(), Collected()
    collected.add(await call.read())
    await call.write(SchedulerLinkServiceConnectRequest(requests=submissions))
    await collected.read_until_finished(call, *(one.request_id for one in submissions))
    call.cancel()
    return collected


def admin(line: ServiceLine) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(line.channel)


async def load(line: ServiceLine, name: str, path: str, *, replaces: bool = False) -> Any:
    request = admin_pb2.AdminServiceLoadAdapterRequest(name=name, path=path, replaces=replaces)
    return (await admin(line).LoadAdapter(request)).adapter


async def unload(line: ServiceLine, name: str) -> None:
    await admin(line).UnloadAdapter(admin_pb2.AdminServiceUnloadAdapterRequest(name=name))


async def has_unloaded(executor: FakeExecutorServicer) -> None:
    """Waits until the executor was told to forget an adapter."""
    async with asyncio.timeout(10):
        await executor.has_unloaded.wait()


async def names(line: ServiceLine) -> list[str]:
    return [adapter.name for adapter in (await line.load()).model_info.adapters]


async def test_adapters_of_flags_are_served_by_name(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor({"x": "xx", "y": "yy"})).running() as line:
        await line.wait_for_executors(1)
        assert await names(line) == ["x", "y"]
        outputs = await asyncio.gather(*(generate(line, name) for name in ("x", "y", "", "x")))
        assert outputs == [output("xx"), output("yy"), output(""), output("xx")]
        assert {new.adapter_slot for new in line.executor.new_requests} == {0, 1, 2}


async def test_the_executor_has_an_adapter_in_memory_before_its_request_enters(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor({"x": "xx"})).running() as line:
        await line.wait_for_executors(1)
        line.executor.may_load_adapter.clear()
        waiting = asyncio.create_task(generate(line, "x"))
        await line.executor.has_been_asked_for_adapter.wait()
        assert await generate(line, "") == output("")  # others go on
        assert line.executor.adapter_loads[0].digest == "xx" and not waiting.done()
        line.executor.may_load_adapter.set()
        assert await waiting == output("xx")


async def test_an_unknown_name_is_not_found(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor({"x": "xx"}, files=DIRECTORY)).running() as line:
        await line.wait_for_executors(1)
        for name in ("other", "../x", "/etc/passwd", "x" * 5000, "x\n", "\0", "unfit", "unfit"):
            with pytest.raises(
                grpc.aio.AioRpcError, match=r"'unfit' cannot be served: it is for|does not exist"
            ) as raised:
                await generate(line, name)
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            assert len(raised.value.details() or "") < 200
            assert (name == "unfit") == ("cannot be served" in (raised.value.details() or ""))
        # An executor is asked only for what lies in its directory, and not for the same again.
        assert [one.name for one in line.executor.adapter_loads] == ["unfit"]


async def test_an_adapter_of_the_directory_is_loaded_on_first_use(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor(files=DIRECTORY), executor(files=DIRECTORY))
    async with line.running():
        await line.wait_for_executors(2)
        outputs = await asyncio.gather(*(generate(line, "found") for _ in range(4)))
        assert outputs == [output("ff")] * 4
        assert await names(line) == ["found", "unfit"]
        assert all("ff" in one.executor.loaded_adapters for one in line.executors)


async def test_a_line_without_adapters_knows_none(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, FakeExecutorServicer()).running() as line:
        await line.wait_for_executors(1)
        with pytest.raises(grpc.aio.AioRpcError, match="does not exist"):
            await generate(line, "found")
        with pytest.raises(grpc.aio.AioRpcError, match="--enable-lora") as raised:
            await load(line, "x", "/a")
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_an_adapter_is_loaded_on_all_executors(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor(), executor())
    async with line.running():
        await line.wait_for_executors(2)
        call, collected = line.link.Connect(), Collected()
        collected.add(await call.read())
        loaded = await load(line, "x", "/a")
        assert (loaded.name, loaded.path, loaded.digest, loaded.rank) == ("x", "/a", "aa", 8)
        collected.add(await call.read())
        assert [[one.name for one in hello.adapters] for hello in collected.hellos] == [[], ["x"]]
        assert all("aa" in one.adapters for one in line.executors)
        assert await generate(line, "x") == output("aa")
        assert (await load(line, "x", "/a")).digest == "aa"  # the same contents again
        call.cancel()


@pytest.mark.parametrize(
    ("name", "path", "code", "message"),
    [
        ("x", "/nothing", grpc.StatusCode.NOT_FOUND, "nothing is at /nothing"),
        ("x", "/bad", grpc.StatusCode.INVALID_ARGUMENT, "it is for another model"),
        ("x", "/" * 4096, grpc.StatusCode.INVALID_ARGUMENT, "path: expected that of a file"),
        ("x", "/a\0", grpc.StatusCode.INVALID_ARGUMENT, "path: expected that of a file"),
        ("x", "/a\n", grpc.StatusCode.INVALID_ARGUMENT, "path: expected that of a file"),
        (
            "x",
            "https://hub.example/a",
            grpc.StatusCode.INVALID_ARGUMENT,
            "found the URL 'https.*; download the adapter",
        ),
        ("", "/a", grpc.StatusCode.INVALID_ARGUMENT, "name: use up to"),
        ("../x", "/a", grpc.StatusCode.INVALID_ARGUMENT, "name: use up to"),
        ("x\n", "/a", grpc.StatusCode.INVALID_ARGUMENT, "name: use up to"),
        ("y", "/b", grpc.StatusCode.ALREADY_EXISTS, "already been loaded"),
    ],
)
async def test_a_refusal_changes_nothing(
    tmp_path: Path, name: str, path: str, code: grpc.StatusCode, message: str
) -> None:
    async with ServiceLine(tmp_path, executor({"y": "yy"})).running() as line:
        await line.wait_for_executors(1)
        with pytest.raises(grpc.aio.AioRpcError, match=message) as raised:
            await load(line, name, path)
        assert raised.value.code() is code
        assert await names(line) == ["y"] and list(line.executor.adapters) == ["yy"]
        assert await generate(line, "y") == output("yy")


@pytest.mark.parametrize("other", [{}, {"/a": "bad"}, {"/a": "changed"}])
async def test_all_executors_load_it_or_none(tmp_path: Path, other: dict[str, str]) -> None:
    line = ServiceLine(tmp_path, executor(), executor(files=other))
    async with line.running():
        await line.wait_for_executors(2)
        with pytest.raises(grpc.aio.AioRpcError):
            await load(line, "x", "/a")
        assert not await names(line)
        assert not any(one.adapters for one in line.executors)


async def test_a_replaced_adapter_computes_its_requests_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_UNUSED_S", 0.0)
    monkeypatch.setattr(module, "_SWEEP_S", 0.01)
    async with ServiceLine(tmp_path, executor({"x": "xx"}, step_seconds=0.005)).running() as line:
        await line.wait_for_executors(1)
        call = aiter(line.stub.Generate(generate_request([1, 2, 3], adapter="x", max_tokens=60)))
        token_ids = list((await anext(call)).token_ids)
        await load(line, "x", "/b", replaces=True)
        assert await generate(line, "x") == output("bb")
        assert "xx" in line.executor.adapters
        async for response in call:
            token_ids += response.token_ids
        assert token_ids == output("xx", max_tokens=60)
        await has_unloaded(line.executor)
        assert await generate(line, "x") == output("bb")


async def test_an_unloaded_name_goes_for_good(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor({"x": "xx"}), executor({"x": "xx"}))
    async with line.running():
        await line.wait_for_executors(2)
        await load(line, "x", "/b", replaces=True)  # executors have both contents under the name
        await unload(line, "x")
        assert not await names(line)
        with pytest.raises(grpc.aio.AioRpcError, match="does not exist"):
            await generate(line, "x")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await unload(line, "x")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        # A scheduler that starts before the executors have forgotten the contents does not learn the name from them.
        later = ServiceLine(tmp_path, *line.executors, name="later")
        async with later.running(with_executor=False):
            await later.wait_for_executors(2)
            assert not await names(later)
            resumed = token_submission(1, [1, 2, 3], output("bb")[:2], adapter="x", adapter_digest="bb", max_tokens=5)
            assert (await generate_linked(later, resumed)).token_ids[1] == output("bb")[2:]


async def test_an_executor_that_starts_again_with_a_flag_does_not_bring_an_unloaded_name_back(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor({"x": "xx"}))
    async with line.running():
        await line.wait_for_executors(1)
        await unload(line, "x")
        await line.kill_executor()
        await line.wait_for_executors(0)
        await line.start_executor(executor({"x": "xx"}))
        await line.wait_for_executors(1)
        assert not await names(line)
        async with asyncio.timeout(10):  # a later scheduler would not learn it either
            while [one.name for one in line.executor.adapters.values()] != [""]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_contents_that_no_request_needs_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_UNUSED_S", 0.0)
    monkeypatch.setattr(module, "_SWEEP_S", 0.01)
    line = ServiceLine(tmp_path, executor({"x": "xx"}), executor({"x": "xx"}))
    async with line.running():
        await line.wait_for_executors(2)
        await unload(line, "x")
        await asyncio.gather(*map(has_unloaded, line.executors))
        assert not any(one.adapters for one in line.executors)


# -- the directory ----------------------------------------------------------------------------------------------------


async def wait_for_names(line: ServiceLine, *expected: str) -> None:
    async with asyncio.timeout(10):
        while await names(line) != list(expected):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_adapter_that_is_put_into_the_directory_appears_changes_and_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "_WATCH_S", 0.01)
    line = ServiceLine(tmp_path, executor(files={}, step_seconds=0.005), executor(files={}, step_seconds=0.005))
    async with line.running():
        await line.wait_for_executors(2)
        files = [one.adapter_files for one in line.executors]
        for of_executor in files:
            of_executor["/ad/new"] = "n1"
        await wait_for_names(line, "new")
        assert not any(one.adapter_loads for one in line.executors)  # it is read when a request names it
        assert await generate(line, "new") == output("n1")
        call = aiter(line.stub.Generate(generate_request([1, 2, 3], adapter="new", max_tokens=60)))
        token_ids = list((await anext(call)).token_ids)
        for of_executor in files:
            of_executor["/ad/new"] = "n2"
        async with asyncio.timeout(10):
            while await generate(line, "new") != output("n2"):
                pass
        for of_executor in files:
            del of_executor["/ad/new"]
        await wait_for_names(line)
        with pytest.raises(grpc.aio.AioRpcError, match="does not exist"):
            await generate(line, "new")
        async for response in call:
            token_ids += response.token_ids
        assert token_ids == output("n1", max_tokens=60)
        for of_executor in files:
            of_executor["/ad/new"] = "n3"
        await wait_for_names(line, "new")
        assert await generate(line, "new") == output("n3")


async def test_contents_that_cannot_be_served_do_not_replace_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "_WATCH_S", 0.01)
    async with ServiceLine(tmp_path, executor(files={"/ad/x": "x1"})).running() as line:
        await line.wait_for_executors(1)
        assert await generate(line, "x") == output("x1")
        line.executor.has_been_asked_for_adapter.clear()
        line.executor.adapter_files["/ad/x"] = "bad"
        async with asyncio.timeout(10):
            await line.executor.has_been_asked_for_adapter.wait()
        assert await generate(line, "x") == output("x1")
        line.executor.adapter_files["/ad/other"] = "oo"
        await wait_for_names(line, "other", "x")  # looks go on


async def test_an_unloaded_adapter_stays_away_although_it_lies_in_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "_WATCH_S", 0.01)
    async with ServiceLine(tmp_path, executor(files={"/ad/x": "x1", "/ad/y": "y1"})).running() as line:
        await line.wait_for_executors(1)
        await generate(line, "x")
        await unload(line, "x")
        await unload(line, "y")  # which was not loaded
        assert not await names(line)
        line.executor.adapter_files["/ad/z"] = "z1"
        await wait_for_names(line, "z")
        files = line.executor.adapter_files
        await line.kill_executor()
        await line.wait_for_executors(0)
        await line.start_executor(executor(files=files))
        await line.wait_for_executors(1)
        assert await names(line) == ["z"]
        assert (await load(line, "x", "/ad/x")).digest == "x1"
        assert await names(line) == ["x", "z"]


async def test_an_unloaded_adapter_with_newer_files_is_found_by_an_executor_that_starts(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor(files={"/ad/x": "x1", "/ad/y": "y1"})).running() as line:
        await line.wait_for_executors(1)
        await generate(line, "x")
        await unload(line, "x")
        await unload(line, "y")
        await line.kill_executor()
        await line.wait_for_executors(0)
        later = executor(files={"/ad/x": "x2", "/ad/y": "y2"})
        later.files_changed_at = time.time_ns()
        await line.start_executor(later)
        await line.wait_for_executors(1)
        assert await names(line) == ["x", "y"]
        assert await generate(line, "x") == output("x2")
        assert await generate(line, "y") == output("y2")


async def test_why_an_adapter_of_the_directory_cannot_be_served_is_known_until_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names_module, "_WATCH_S", 0.01)
    async with ServiceLine(tmp_path, executor(files={"/ad/x": "bad", "/ad/y": "y1"})).running() as line:
        await line.wait_for_executors(1)
        why = "it is for another model"
        for is_known in (False, True):
            with pytest.raises(grpc.aio.AioRpcError, match=f"the adapter 'x' cannot be served: {why}") as raised:
                await generate(line, "x")
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            if not is_known:
                await wait_for_problems(line, x=why, y="")
        assert len(line.executor.adapter_loads) == 1
        line.executor.adapter_files["/ad/x"] = "x1"
        await wait_for_problems(line, x="", y="")
        assert await generate(line, "x") == output("x1")


async def wait_for_problems(line: ServiceLine, **expected: str) -> None:
    async with asyncio.timeout(10):
        while {one.name: one.problem for one in (await line.load()).model_info.adapters} != expected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_new_executor_is_given_what_it_lacks(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor({"y": "yy"}), executor({"y": "yy"}))
    async with line.running():
        await line.wait_for_executors(2)
        await load(line, "x", "/a")
        for index in range(2):
            await line.kill_executor(index)
        await line.wait_for_executor(present=False)
        await line.start_executor(executor({"y": "yy"}))
        await line.wait_for_executors(1)
        assert await generate(line, "x") == output("aa")
        assert await generate(line, "y") == output("yy")


async def test_a_later_scheduler_learns_from_the_executors(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor({"x": "xx"}), executor({"x": "xx"}))
    for index in range(2):
        await line.start_executor(index=index)
    async with line.running(with_executor=False):
        await line.wait_for_executors(2)
        await load(line, "x", "/a", replaces=True)
        later = ServiceLine(tmp_path, *line.executors, name="later")
        async with later.running(with_executor=False):
            await later.wait_for_executors(2)
            assert [one.digest for one in (await later.load()).model_info.adapters] == ["aa"]
            # A request that began with the contents before goes on with them.
            resumed = token_submission(1, [1, 2, 3], output("xx")[:2], adapter="x", adapter_digest="xx", max_tokens=5)
            collected = await generate_linked(later, resumed)
            assert collected.token_ids[1] == output("xx")[2:]
            assert await generate(later, "x") == output("aa")


async def test_requests_wait_for_executors_that_may_have_their_adapter(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor({"x": "xx"}))
    await line.start_executor()
    line.executor.loaded.clear()
    async with line.running(with_executor=False):
        waiting = asyncio.create_task(generate_after_hello(line))
        await line.executor.asked.wait()
        line.executor.loaded.set()
        assert await waiting == output("xx")


async def generate_after_hello(line: ServiceLine) -> list[int]:
    submission = token_submission(1, [1, 2, 3], adapter="x", adapter_digest="xx", max_tokens=5)
    return (await generate_linked(line, submission)).token_ids[1]


async def test_contents_that_are_gone_end_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never another adapter."""
    monkeypatch.setattr(module, "_RESUBMITTED_S", 0.0)
    async with ServiceLine(tmp_path, executor({"x": "xx"})).running() as line:
        await line.wait_for_executors(1)
        collected = await generate_linked(
            line, token_submission(1, [1, 2, 3], adapter="x", adapter_digest="gone", max_tokens=5)
        )
        assert collected.errors[1].code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert not collected.token_ids[1]


async def test_a_waiting_request_ends_when_no_executor_has_its_adapter_any_longer(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor({"x": "xx"}, files={}))
    async with line.running():
        await line.wait_for_executors(1)
        await line.kill_executor()
        await line.wait_for_executors(0)
        waiting = asyncio.create_task(generate(line, "x"))
        await line.wait_for_waiting(0)
        await line.start_executor(executor(files={}))  # without the flag and the files
        with pytest.raises(
            grpc.aio.AioRpcError, match="adapter x cannot be used any longer: nothing is at /x"
        ) as raised:
            await waiting
        assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert await generate(line, "") == output("")


async def test_a_refused_change_leaves_other_names_of_the_contents(tmp_path: Path) -> None:
    line = ServiceLine(tmp_path, executor({"x": "xx", "y": "yy"}), executor({"x": "xx", "y": "yy"}))
    async with line.running():
        await line.wait_for_executors(2)
        await load(line, "alias", "/a")
        with pytest.raises(grpc.aio.AioRpcError, match="already been loaded"):
            await load(line, "y", "/a")  # with contents that have a name
        later = ServiceLine(tmp_path, *line.executors, name="later")
        async with later.running(with_executor=False):
            await later.wait_for_executors(2)
            assert await names(later) == ["alias", "x", "y"]
            outputs = [await generate(later, name) for name in ("alias", "x", "y")]
            assert outputs == [output("aa"), output("xx"), output("yy")]


async def test_a_name_for_a_linked_request_without_contents_is_resolved(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, executor({"x": "xx"})).running() as line:
        await line.wait_for_executors(1)
        collected = await generate_linked(
            line,
            token_submission(1, [1, 2, 3], adapter="x", max_tokens=5),
            token_submission(2, [1, 2, 3], adapter="z", max_tokens=5),
        )
        assert collected.token_ids[1] == output("xx")
        assert collected.errors[2].code == grpc.StatusCode.NOT_FOUND.value[0]

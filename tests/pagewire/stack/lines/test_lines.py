"""Lines that make room for each other, seen by what happens to their processes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.errors import StartupError
from pagewire.flags.lines import LineSettings, StackModels
from pagewire.stack.lines import lines as module
from pagewire.stack.lines import wanted
from pagewire.stack.lines.line import LineError
from pagewire.stack.lines.lines import Lines
from pagewire.stack.lines.plan import Place, Room
from pagewire.stack.lines.sizes import KeptSizes
from tests.pagewire.stack.lines.fake_processes import FakeProcesses, settings_of


class Stack:
    """Lines with fake processes, by name."""

    def __init__(self, directory: Path, room: Room, *models: LineSettings, default: str = "") -> None:
        self.log: list[str] = []
        self.processes: dict[str, FakeProcesses] = {}
        self.failures: list[StartupError] = []
        kept = KeptSizes(directory / "lines.json")
        self.lines = Lines(StackModels(models, default), room, self._make, kept, on_failure=self.failures.append)

    def _make(self, one: LineSettings, number: int) -> FakeProcesses:
        self.processes[one.name] = FakeProcesses(one.name, self.log)
        return self.processes[one.name]

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Stack"]:
        task = asyncio.create_task(self.lines.run())
        try:
            async with asyncio.timeout(20):
                yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def until(self, is_so: Callable[[], object]) -> None:
        while True:
            changed = self.lines.changed
            if is_so():
                return
            await changed.wait()

    async def ready(self, name: str) -> None:
        self.lines.request(name)
        await self.until(lambda: self.lines.find(name).place is Place.READY)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.005)
    monkeypatch.setattr(module, "LOOK_S", 0.005)
    monkeypatch.setattr(wanted, "LOOK_S", 0.005)


async def test_who_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(9), settings_of("a"), settings_of("b"), settings_of("c"))
    async with stack.running():
        await stack.ready("a")
        await stack.ready("b")
        await stack.ready("a")
        await stack.ready("c")
        assert stack.log == ["start a", "start b", "sleep b", "end b", "start c"]


async def test_a_line_that_cannot_load_fails_alone_and_waits_longer_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("good"), settings_of("bad"))
    stack.processes["bad"].problem = "model.safetensors is damaged"
    async with stack.running():
        bad = stack.lines.find("bad")
        delays = []
        for _ in range(8):
            bad.retry_at = 0.0
            stack.lines.request("bad")
            assert not bad.problem
            await stack.until(lambda: bad.problem)
            delays.append(round(bad.retry_at - time.time()))
            with pytest.raises(LineError, match=r"bad: model\.safetensors is damaged") as refused:
                stack.lines.request("bad")
            assert refused.value.code == "refused" and refused.value.retry_after is not None
        assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
        assert bad.place is Place.ABSENT and not stack.processes["bad"].runs
        await stack.ready("good")
        stack.processes["bad"].problem, bad.retry_at = "", 0.0
        await stack.ready("bad")
        assert (bad.problem, bad.num_loads, bad.num_failures) == ("", 1, 8)
    assert len([one for one in caplog.records if "is damaged" in one.message]) == 8, "once for each attempt"
    assert not stack.failures


async def test_a_damaged_model_takes_the_place_of_no_other(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(4), settings_of("a"), settings_of("bad"))
    stack.processes["bad"].damage = "bad.gguf is cut off"
    async with stack.running():
        await stack.ready("a")
        stack.lines.request("bad")
        await stack.until(lambda: stack.lines.find("bad").problem)
        assert stack.log == ["start a"] and stack.lines.find("bad").problem == "bad.gguf is cut off"


async def test_a_pinned_line_that_cannot_start_at_first_ends_the_stack(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a", is_pinned=True))
    stack.processes["a"].problem = "no such file"
    stack.lines.begin(stack.lines.lines[0])
    await stack.until(lambda: stack.failures)
    stack.lines.has_started = True


async def test_a_pinned_line_that_failed_later_is_tried_again_without_a_request(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a", is_pinned=True))
    a, processes = stack.lines.lines[0], stack.processes["a"]
    stack.lines.has_started = True
    async with stack.running():
        await stack.ready("a")
        await stack.lines.rest("a", ends=False)
        processes.problem = "out of memory"
        stack.lines.request("a")
        await stack.until(lambda: a.problem)
        processes.problem, a.retry_at = "", 0.0
        await stack.until(lambda: a.place is Place.READY)


async def test_running_requests_are_waited_for_in_the_order_of_wishes(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(4), settings_of("a"), settings_of("b"), settings_of("c"))
    async with stack.running():
        await stack.ready("a")
        stack.processes["a"].num_requests = 1
        stack.lines.request("b")
        stack.lines.request("c")
        await stack.until(lambda: stack.lines.find("b").progress == "waits for a")
        assert not stack.processes["b"].runs and not stack.processes["c"].runs
        stack.processes["a"].num_requests = 0
        await stack.until(lambda: stack.lines.find("c").place is Place.READY)
        starts = [event for event in stack.log if event.startswith("start")]
        assert starts == ["start a", "start b", "start c"]


async def test_requests_without_a_pause_do_not_hold_others_up_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wanted, "PATIENCE_S", 0.01)
    stack = Stack(tmp_path, Room(4), settings_of("a"), settings_of("b"))
    async with stack.running():
        await stack.ready("a")
        stack.processes["a"].num_requests = 1
        stack.lines.request("b")
        while not stack.lines.find("a").operation.locked():  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0)
        assert not stack.processes["b"].runs
        stack.processes["a"].num_requests = 0
        await stack.until(lambda: stack.lines.find("b").place is Place.READY)


@pytest.mark.parametrize("patience", [0.0, 100.0])
async def test_a_line_that_fits_now_overtakes_one_that_waits_unless_that_one_needs_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    monkeypatch.setattr(wanted, "PATIENCE_S", patience)
    models = [settings_of(name, size) for name, size in (("a", 5), ("b", 6), ("c", 3), ("d", 4))]
    stack = Stack(tmp_path, Room(9), *models)
    async with stack.running():
        await stack.ready("a")
        stack.processes["a"].num_requests = 1
        for name in ("b", "d", "c"):
            stack.lines.request(name)
        await stack.until(lambda: stack.lines.find("c").place is Place.READY)
        assert stack.log == ["start a", "start c"]
        stack.processes["a"].num_requests = 0
        await stack.until(lambda: stack.lines.find("b").place is Place.READY)
        assert stack.processes["c"].runs and not stack.processes["c"].sleeps
        await stack.until(lambda: stack.lines.find("d").place is Place.READY)


async def test_what_never_fits_is_refused_with_the_reason(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(6), settings_of("a", is_pinned=True), settings_of("b"))
    async with stack.running():
        await stack.ready("a")
        stack.lines.request("b")
        await stack.until(lambda: stack.lines.find("b").problem)
        assert "needs 0.00 GiB" in stack.lines.find("b").problem and "pinned a" in stack.lines.find("b").problem
        assert stack.lines.find("a").place is Place.READY


async def test_an_idle_line_falls_asleep_and_a_request_at_its_service_wakes_it(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a", idle_timeout=0.01))
    async with stack.running():
        await stack.ready("a")
        a, processes = stack.lines.find("a"), stack.processes["a"]
        assert a.rest_in is not None
        processes.idle_seconds = 60.0
        await stack.until(lambda: a.place is Place.ASLEEP)
        assert (processes.sleeps, a.rest_in, a.sleeps_until_woken) == (True, None, False)
        a.idle_override = -1.0
        processes.num_requests = 1
        await stack.until(lambda: a.place is Place.READY)
        assert a.num_loads == 2 and a.rest_in is None


async def test_what_an_operator_put_to_sleep_stays_so_until_it_is_woken(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a"))
    async with stack.running():
        await stack.ready("a")
        a, processes = stack.lines.find("a"), stack.processes["a"]
        processes.sleeps, processes.num_requests = True, 1
        await stack.until(lambda: a.place is Place.ASLEEP)
        assert a.sleeps_until_woken
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert a.place is Place.ASLEEP
        await stack.ready("a")
        assert not a.sleeps_until_woken and not processes.sleeps


async def test_lines_come_and_go_while_others_serve(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a"))
    async with stack.running():
        await stack.ready("a")
        line, is_new = await stack.lines.put(settings_of("b"))
        assert is_new and (await stack.lines.put(settings_of("b"))) == (line, False)
        with pytest.raises(LineError, match="with other settings") as refused:
            await stack.lines.put(settings_of("b", 5))
        assert refused.value.code == "exists"
        stack.processes["b"].may_start.clear()
        stack.lines.request("b")
        await stack.until(lambda: line.place is Place.LOADING and stack.processes["b"].runs)
        await stack.lines.delete("b")
        assert not stack.processes["b"].runs and stack.lines.names == ["a"]
        with pytest.raises(LineError, match="'b' does not exist; served here: a"):
            stack.lines.request("b")
        with pytest.raises(LineError, match="the only model"):
            await stack.lines.delete("a")
        await stack.lines.rest("a", ends=True)
        assert not stack.processes["a"].runs
        await stack.ready("a")


async def test_a_request_during_the_end_of_processes_loads_new_ones(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a"))
    async with stack.running():
        await stack.ready("a")
        a, processes = stack.lines.find("a"), stack.processes["a"]
        await stack.lines.rest("a", ends=False)
        processes.may_end.clear()
        ending = asyncio.create_task(stack.lines.rest("a", ends=True))
        while not a.operation.locked():  # noqa: ASYNC110 - of another task
            await asyncio.sleep(0)
        stack.lines.request("a")
        for _ in range(20):
            await asyncio.sleep(0)
        processes.may_end.set()
        await ending
        await stack.until(lambda: a.place is Place.READY)
        assert stack.log == ["start a", "sleep a", "end a", "start a"]


async def test_a_request_does_not_bring_a_line_back_that_is_being_deleted(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a"), settings_of("b"))
    async with stack.running():
        await stack.ready("a")
        a, processes = stack.lines.find("a"), stack.processes["a"]
        processes.may_measure.clear()
        deleting = asyncio.create_task(stack.lines.delete("a"))
        await stack.until(lambda: a.place is Place.ASLEEP)
        with pytest.raises(LineError, match="a is being deleted"):
            stack.lines.request("a")
        with pytest.raises(LineError, match="a is being deleted"):
            await stack.lines.put(settings_of("a"))
        with pytest.raises(LineError, match="b is the only model"):
            await stack.lines.delete("b")
        for _ in range(20):
            await asyncio.sleep(0)
        processes.may_measure.set()
        await deleting
        await stack.ready("b")
        assert stack.log == ["start a", "sleep a", "end a", "start b"] and stack.lines.names == ["b"]


async def test_requests_do_not_wait_for_the_measurement_of_a_line(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a"))
    processes = stack.processes["a"]
    processes.may_measure.clear()
    processes.may_start.clear()
    async with stack.running():
        stack.lines.request("a")
        await stack.until(lambda: processes.runs)
        processes.may_start.set()
        await stack.until(lambda: stack.lines.find("a").place is Place.READY)
        processes.may_measure.set()


async def test_a_model_that_is_being_deleted_is_neither_added_nor_loaded_again(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a"), settings_of("b"))
    async with stack.running():
        await stack.ready("b")
        stack.processes["b"].num_requests = 1
        deleting = asyncio.create_task(stack.lines.delete("b"))
        await stack.until(lambda: stack.lines.find("b").operation.locked())
        for wish in (lambda: stack.lines.request("b"), lambda: stack.lines.put(settings_of("b"))):
            with pytest.raises(LineError, match="b is being deleted"):
                await wish()  # type: ignore[misc]
        with pytest.raises(LineError, match="a is the only model"):
            await stack.lines.delete("a")
        stack.processes["b"].num_requests = 0
        await deleting
        assert stack.log == ["start b", "sleep b", "end b"] and stack.lines.names == ["a"]
        assert (await stack.lines.put(settings_of("b")))[1]


async def test_a_model_that_is_deleted_while_its_turn_comes_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(tmp_path, Room(100), settings_of("a"), settings_of("b"))
    looks, goes_on = asyncio.Event(), asyncio.Event()

    async def load() -> None:
        looks.set()
        await goes_on.wait()

    async with stack.running():
        await stack.ready("a")
        monkeypatch.setattr(stack.processes["a"], "load", load)
        stack.lines.request("b")
        await looks.wait()
        await stack.lines.delete("b")
        goes_on.set()
        await stack.ready("a")
        await stack.lines.rest("a", ends=True)
        assert stack.log == ["start a", "sleep a", "end a"]


async def test_those_who_wait_are_told_that_a_wish_was_taken_back(tmp_path: Path) -> None:
    stack = Stack(tmp_path, Room(4), settings_of("a"), settings_of("b"))
    async with stack.running():
        await stack.ready("a")
        stack.processes["a"].num_requests = 1
        b = stack.lines.request("b")
        await stack.until(lambda: b.progress == "waits for a")
        await stack.lines.rest("b", ends=True)
        assert b.num_withdrawals == 1
        stack.processes["a"].num_requests = 0
        await stack.ready("b")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 3)), min_size=1, max_size=25), st.integers(4, 12))
def test_every_wish_comes_true_and_memory_is_never_exceeded(
    tmp_path_factory: pytest.TempPathFactory, wishes: list[tuple[str, int]], memory: int
) -> None:
    async def run() -> None:
        models = [settings_of(name, size) for name, size in zip("abcde", (1, 2, 3, 4, 4), strict=True)]
        stack = Stack(tmp_path_factory.mktemp("lines"), Room(memory), *models)
        sizes = {one.name: one.memory or 0 for one in models}
        async with stack.running():
            for name, pauses in wishes:
                stack.lines.request(name)
                for _ in range(pauses):
                    await asyncio.sleep(0)
                awake = [one for one in stack.processes.values() if one.runs and not one.sleeps]
                assert sum(sizes[one.name] for one in awake) <= memory
            for name in sorted({name for name, _ in wishes}):
                while stack.lines.find(name).place is not Place.READY:  # others that were wished before take its place
                    stack.lines.request(name)
                    await asyncio.sleep(0)
            assert not any(line.problem for line in stack.lines.lines)

    asyncio.run(run())

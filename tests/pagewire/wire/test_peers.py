"""Several services behind one link, which come, break and go: each request ends once, with all of its tokens."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.wire.discovery import Static
from pagewire.wire.streams import Affinity, resubmitting_link
from pagewire.wire.streams import link as link_module
from tests.pagewire.wire.counting import CountedRequest, CountingService, linked, serving
from tests.pagewire.wire.peer_line import Line, assert_complete, paused, submit, up
from tests.pagewire.wire.test_streams import eventually
from tests.sweep import examples

ONE = Affinity(b"one", b"one")


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    with mock.patch.multiple(link_module, FIRST_BACKOFF_S=0.002, MAX_BACKOFF_S=0.01):
        yield


# Which peer gets which request.


async def test_requests_are_divided_evenly(tmp_path: Path) -> None:
    line = Line(tmp_path, *paused(3))
    async with line.running() as link:
        await up(link, 3)
        requests = submit(link, 30)
        await eventually(lambda: line.num_live == [10, 10, 10])
        for request in requests[:10]:
            link.abort(request)
        await eventually(lambda: sum(line.num_live) == 20)
        more = submit(link, 10)
        await eventually(lambda: line.num_live == [10, 10, 10])
        for service in line.services:
            service.running.set()
        await asyncio.wait_for(link.drained(), 10)
    assert_complete([*requests[10:], *more], *line.services)


async def test_those_of_a_conversation_are_at_one_service_up_to_its_share(tmp_path: Path) -> None:
    line = Line(tmp_path, *paused(2))
    async with line.running() as link:
        await up(link, 2)
        submit(link, 8, affinity=ONE)
        await eventually(lambda: sorted(line.num_live) == [0, 8])
        submit(link, 24, affinity=ONE)
        await eventually(lambda: sum(line.num_live) == 32)
        assert max(line.num_live) <= 1.25 * 33 / 2


# Which peer breaks.


async def test_what_a_service_had_that_dies_goes_on_at_another_at_once(tmp_path: Path) -> None:
    line = Line(tmp_path, *paused(2))
    async with line.running() as link:
        await up(link, 2)
        requests = submit(link, 8)
        await eventually(lambda: line.num_live == [4, 4])
        await line.kill(0)
        await eventually(lambda: line.num_live == [0, 8])
        assert link.is_up and link.is_available
        resubmitted = [begun.resubmitted for begun in line.services[1].sessions[-1].begun]
        assert Counter(resubmitted) == {False: 4, True: 4}
        await line.start(0)
        await up(link, 2)
        more = submit(link, 8)
        await eventually(lambda: line.num_live == [8, 8])
        for service in line.services:
            service.running.set()
        await asyncio.wait_for(link.drained(), 10)
    assert_complete([*requests, *more], *line.services)


@settings(max_examples=examples(30), deadline=None)
@given(
    breaks=st.lists(st.lists(st.integers(0, 14), max_size=4), min_size=2, max_size=3),
    counts=st.lists(st.tuples(st.integers(1, 8), st.none() | st.integers(0, 4)), min_size=1, max_size=10),
    kills=st.lists(st.integers(0, 2), max_size=4),
)
async def test_breaks_and_deaths_cost_nothing(
    breaks: list[list[int]], counts: list[tuple[int, int | None]], kills: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        line = Line(Path(directory), *(CountingService(breaks=list(moments)) for moments in breaks))
        async with line.running() as link, asyncio.timeout(20):
            requests = [CountedRequest(1000 * i, *count) for i, count in enumerate(counts)]
            for request in requests:
                link.submit(request)
                if request.abort_after == 0:
                    link.abort(request)
                    request.has_ended.set()
            for number in (kill % len(breaks) for kill in kills):
                await asyncio.sleep(0.004)
                await line.kill(number)
                await line.start(number)
            for request in requests:
                await request.has_ended.wait()
            await link.drained()
            assert link.num_live == 0 and all(peer.load == 0 for peer in link.peers)
            await eventually(lambda: not any(line.num_live))
        for request in requests:
            assert request.error is None
            expected = request.expected if request.abort_after is None else request.expected[: len(request.received)]
            assert request.received == expected
        assert not any(service.errors for service in line.services)


async def test_a_request_that_kills_each_service_does_not_wander_for_ever(tmp_path: Path) -> None:
    line = Line(tmp_path, *(CountingService(breaks=[2] * 100_000) for _ in range(2)))
    async with line.running(recovery_timeout=0.3) as link:
        await eventually(lambda: link.is_up)
        (request,) = submit(link, 1)
        await asyncio.wait_for(request.has_ended.wait(), 10)
        assert request.error is not None and request.error.code is grpc.StatusCode.UNAVAILABLE


async def test_requests_wait_for_the_first_that_comes(tmp_path: Path) -> None:
    line = Line(tmp_path, *paused(2))
    async with line.running(0) as link:
        await up(link, 1)
        requests = submit(link, 4)
        await eventually(lambda: line.num_live == [4, 0])
        await line.kill(0)
        await eventually(lambda: not link.is_up)
        await line.start(1)
        await eventually(lambda: line.num_live == [0, 4])
        line.services[1].running.set()
        await asyncio.wait_for(link.drained(), 10)
    assert_complete(requests, *line.services)


# Services that join and leave.


async def test_one_that_joins_gets_its_part_and_one_that_leaves_ends_what_it_has(tmp_path: Path) -> None:
    line = Line(tmp_path, *paused(2))
    line.discovery.publish(line.address(0))
    async with line.running() as link:
        await eventually(lambda: len(link.peers) == 1 and link.is_up)
        requests = submit(link, 4)
        await eventually(lambda: line.num_live == [4, 0])
        line.discovery.publish(line.address(0), line.address(1))
        await up(link, 2)
        requests += submit(link, 4)
        await eventually(lambda: line.num_live == [4, 4])
        line.discovery.publish(line.address(1))
        await eventually(lambda: not link.peers[0].is_listed)
        requests += submit(link, 4)
        await eventually(lambda: line.num_live == [4, 8])
        line.services[0].running.set()
        await eventually(lambda: len(link.peers) == 1)
        assert line.num_live == [0, 8]
        line.services[1].running.set()
        await asyncio.wait_for(link.drained(), 10)
        assert all(not begun.resubmitted for service in line.services for s in service.sessions for begun in s.begun)
    assert_complete(requests, *line.services)


async def test_one_that_leaves_and_dies_is_not_waited_for(tmp_path: Path) -> None:
    line = Line(tmp_path, *paused(2))
    async with line.running() as link:
        await up(link, 2)
        requests = submit(link, 4)
        await eventually(lambda: line.num_live == [2, 2])
        line.discovery.publish(line.address(1))
        await eventually(lambda: not link.peers[0].is_listed)
        await line.kill(0)
        await eventually(lambda: line.num_live == [0, 4] and len(link.peers) == 1)
        line.services[1].running.set()
        await asyncio.wait_for(link.drained(), 10)
    assert_complete(requests, *line.services)


async def test_requests_leave_one_that_is_not_ready_if_another_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resubmitting_link, "UNREADY_S", 0.05)
    line = Line(tmp_path, *paused(2))
    async with line.running() as link:
        await up(link, 2)
        first, second = link.peers
        requests = submit(link, 6)
        await eventually(lambda: line.num_live == [3, 3])
        first._pings = SimpleNamespace(is_serving=False)  # type: ignore[assignment]
        first._on_ping()
        await eventually(lambda: line.num_live == [0, 6])
        requests += submit(link, 2)
        await eventually(lambda: line.num_live == [0, 8])
        second._pings = SimpleNamespace(is_serving=False)  # type: ignore[assignment]
        second._on_ping()
        await asyncio.sleep(0.1)
        assert line.num_live == [0, 8], "none is ready: they wait where they are"
        line.services[1].running.set()
        await asyncio.wait_for(link.drained(), 10)
    assert_complete(requests, *line.services)


async def test_one_that_drains_ends_what_it_has_and_gets_nothing_new(tmp_path: Path) -> None:
    line = Line(tmp_path, *paused(2))
    async with line.running() as link:
        await up(link, 2)
        requests = submit(link, 4)
        await eventually(lambda: line.num_live == [2, 2])
        line.services[0].draining.begin()
        await eventually(lambda: link.peers[0].is_draining)
        requests += [*submit(link, 4), *submit(link, 4, affinity=ONE)]
        await eventually(lambda: line.num_live == [2, 10])
        line.services[1].draining.begin()
        await eventually(lambda: link.peers[1].is_draining)
        requests += submit(link, 4)
        await eventually(lambda: line.num_live == [6, 10])
        # A successor of the first.
        line.services[0].running.set()
        await eventually(lambda: line.num_live == [0, 10])
        await line.kill(0)
        line.services[0] = paused(1)[0]
        await line.start(0)
        await eventually(lambda: link.peers[0].is_up and not link.peers[0].is_draining)
        requests += submit(link, 4)
        await eventually(lambda: line.num_live == [4, 10])
        for service in line.services:
            service.running.set()
        await asyncio.wait_for(link.drained(), 10)
    assert_complete(requests, *line.services)


async def test_the_same_service_twice_in_a_list_is_one(tmp_path: Path) -> None:
    service = CountingService()
    address = f"unix:{tmp_path}/s.sock"
    async with serving(tmp_path, service), linked(tmp_path, discovery=Static([address, address])) as link:
        requests = submit(link, 3)
        await asyncio.wait_for(link.drained(), 10)
        assert len(service.sessions) == 1
    assert_complete(requests, service)

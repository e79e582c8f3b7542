"""Multiplexed streams that break at every moment: no token is lost, none comes twice, what was aborted ends."""

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.rpc import RpcError
from pagewire.streams import link as link_module
from pagewire.streams import resubmitting_link
from pagewire.streams import session as session_module
from pagewire.v1 import inference_pb2, inference_pb2_grpc
from pagewire.v1.inference_pb2 import ConnectRequest
from tests.pagewire.counting import CountedRequest, CountingLink, CountingService, Tokens, linked, serving


@pytest.fixture(autouse=True, scope="module")
def impatient() -> Iterator[None]:
    with mock.patch.multiple(link_module, FIRST_BACKOFF_S=0.002, MAX_BACKOFF_S=0.01):
        yield


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the state of the other side
            await asyncio.sleep(0.002)


async def run_requests(service: CountingService, requests: list[CountedRequest], late: int = 0) -> None:
    """Runs the requests, the last `late` of them once others have tokens, and checks all that a link promises."""
    with tempfile.TemporaryDirectory() as directory:
        async with serving(Path(directory), service), linked(Path(directory)) as link, asyncio.timeout(20):
            early = len(requests) - late
            for request in requests[:early]:
                submit(link, request)
            await eventually(lambda: not link.num_live or any(request.received for request in requests))
            for request in requests[early:]:
                submit(link, request)
            for request in requests:
                await request.has_ended.wait()
            await link.drained()
            assert link.num_live == 0
            # Aborts have arrived, or there is nothing that they would end.
            await eventually(lambda: service.num_live == 0)
    assert not service.errors
    for request in requests:
        assert request.error is None
        if request.abort_after is None:
            assert request.received == request.expected
        else:
            assert request.received == request.expected[: len(request.received)]
    begun = [request for session in service.sessions for request in session.begun]
    seen = set()
    for request in begun:
        first_token = request.token_ids.ids[0]
        assert request.resubmitted or first_token not in seen, "came again and does not say so"
        seen.add(first_token)


def submit(link: CountingLink, request: CountedRequest) -> None:
    link.submit(request)
    if request.abort_after == 0:
        link.abort(request)
        request.has_ended.set()


@pytest.mark.parametrize("moment", range(16))
async def test_a_break_at_each_moment_costs_nothing(moment: int) -> None:
    requests = [CountedRequest(1000 * i, 5, abort_after=3 if i == 2 else None) for i in range(4)]
    service = CountingService(breaks=[moment, moment])
    await run_requests(service, requests, late=1)
    assert len(service.sessions) >= (3 if moment < 10 else 1), "the stream did break"


@settings(max_examples=40, deadline=None)
@given(
    breaks=st.lists(st.integers(0, 12), max_size=5),
    counts=st.lists(st.tuples(st.integers(1, 6), st.none() | st.integers(0, 4)), min_size=1, max_size=6),
    late=st.integers(0, 3),
)
async def test_breaks_cost_nothing(breaks: list[int], counts: list[tuple[int, int | None]], late: int) -> None:
    requests = [CountedRequest(1000 * i, count, abort_after) for i, (count, abort_after) in enumerate(counts)]
    await run_requests(CountingService(breaks=breaks), requests, min(late, len(requests)))


async def test_what_is_aborted_while_the_service_is_away_does_not_come_back(tmp_path: Path) -> None:
    service = CountingService()
    service.running.clear()
    async with linked(tmp_path) as link:
        async with serving(tmp_path, service):
            gone, stays = CountedRequest(0, 3), CountedRequest(1000, 3)
            for request in (gone, stays):
                link.submit(request)
            await eventually(lambda: service.num_live == 2)
        await eventually(lambda: not link.is_up)
        assert link.is_available, "it may come back"
        link.abort(gone)
        service.running.set()
        async with serving(tmp_path, service):
            await asyncio.wait_for(link.drained(), 10)
    assert (gone.received, stays.received) == ([], stays.expected)
    assert [request.token_ids.ids[0] for request in service.sessions[-1].begun] == [1000]


async def test_an_abort_reaches_the_service(tmp_path: Path) -> None:
    service = CountingService()
    service.running.clear()
    async with serving(tmp_path, service), linked(tmp_path) as link:
        requests = [CountedRequest(1000 * i, 3) for i in range(3)]
        for request in requests:
            link.submit(request)
        await eventually(lambda: service.num_live == 3)
        link.abort(requests[1])
        link.abort(requests[1])
        await eventually(lambda: service.num_live == 2)
        service.running.set()
        await asyncio.wait_for(link.drained(), 10)
    assert [request.received for request in requests] == [requests[0].expected, [], requests[2].expected]


async def test_much_is_sent_in_several_messages_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resubmitting_link, "MAX_SEND_BYTES", 50)
    service = CountingService()
    async with linked(tmp_path) as link:
        requests = [CountedRequest(1000 * i, 2) for i in range(40)]
        for request in requests:
            link.submit(request)
        async with serving(tmp_path, service):
            await asyncio.wait_for(link.drained(), 10)
    assert link.num_messages >= 5
    assert [request.token_ids.ids[0] for request in service.sessions[-1].begun] == [1000 * i for i in range(40)]
    assert all(request.received == request.expected for request in requests)


# The bound on recovery.


async def test_a_service_that_does_not_come_is_given_up_until_it_comes(tmp_path: Path) -> None:
    async with linked(tmp_path, recovery_timeout=0.2) as link:
        changed, request = link.changed, CountedRequest(0, 3)
        link.submit(request)
        await asyncio.wait_for(request.has_ended.wait(), 10)
        assert request.error is not None and request.error.code is grpc.StatusCode.UNAVAILABLE
        assert "--recovery-timeout" in request.error.message
        assert changed.is_set() and not link.is_available and link.num_live == 0
        with pytest.raises(RpcError, match="--recovery-timeout"):
            link.submit(CountedRequest(0, 3))
        changed = link.changed
        async with serving(tmp_path, CountingService()):
            await asyncio.wait_for(changed.wait(), 10)
            assert link.is_available and link.is_up
            again = CountedRequest(0, 3)
            link.submit(again)
            await asyncio.wait_for(again.has_ended.wait(), 10)
            assert again.received == again.expected


async def test_streams_that_break_again_and_again_do_not_prolong_recovery(tmp_path: Path) -> None:
    """A request that kills whoever gets it must not come back for ever; one that has output each time may."""
    service = CountingService(breaks=[2] * 100_000)  # after the greeting and the first message
    async with serving(tmp_path, service), linked(tmp_path, recovery_timeout=0.3) as link:
        await eventually(lambda: link.is_up)
        request = CountedRequest(0, 3)
        link.submit(request)
        await asyncio.wait_for(request.has_ended.wait(), 10)
        assert request.error is not None and request.error.code is grpc.StatusCode.UNAVAILABLE
        assert link.is_available, "new requests may fare better"
        assert len(service.sessions) > 3
        service.breaks = [5] * 100_000  # also after a token
        progressing = CountedRequest(0, 200)
        link.submit(progressing)
        await asyncio.wait_for(progressing.has_ended.wait(), 30)
        assert progressing.received == progressing.expected


async def test_a_request_may_wait_for_its_turn_however_long_once_the_stream_is_up(tmp_path: Path) -> None:
    service = CountingService()
    service.running.clear()
    async with linked(tmp_path, recovery_timeout=0.3) as link:
        request = CountedRequest(0, 3)
        async with serving(tmp_path, service):
            link.submit(request)
            await eventually(lambda: service.num_live == 1)
        async with serving(tmp_path, service):
            await asyncio.sleep(0.6)
            assert request.error is None
            service.running.set()
            await asyncio.wait_for(link.drained(), 10)
    assert request.received == request.expected


async def test_failing_all_aborts_them(tmp_path: Path) -> None:
    service = CountingService()
    service.running.clear()
    async with serving(tmp_path, service), linked(tmp_path) as link:
        requests = [CountedRequest(1000 * i, 3) for i in range(3)]
        for request in requests:
            link.submit(request)
        await eventually(lambda: service.num_live == 3)
        link.fail_all(grpc.StatusCode.UNAVAILABLE, "shutting down")
        assert [request.error.message for request in requests if request.error] == ["shutting down"] * 3
        await eventually(lambda: service.num_live == 0)


# The server side, with clients that are no links.


def stub_of(link: CountingLink) -> grpc.aio.StreamStreamCall:
    return link._link._open_call()


def numbered(number: int, start: int, count: int) -> ConnectRequest:
    message = ConnectRequest()
    message.requests.add(number=number, request={"token_ids": {"ids": [start, count]}})
    return message

"""Multiplexed streams that break at every moment: no token is lost, none comes twice, what was aborted ends."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.v1 import inference_link_pb2_grpc
from pagewire.v1.inference_link_pb2 import ConnectRequest, ConnectResponse
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams import link as link_module
from pagewire.wire.streams import resubmitting_link
from pagewire.wire.streams import session as session_module
from tests.pagewire.wire.counting import (
    CountedRequest,
    CountingLink,
    CountingService,
    CountingSession,
    Tokens,
    linked,
    serving,
)
from tests.sweep import examples


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
    seen = set()
    for begun in [begun for session in service.sessions for begun in session.begun]:
        first_token = begun.request.token_ids.ids[0]
        assert begun.resubmitted or first_token not in seen, "came again and does not say so"
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


@settings(max_examples=examples(40), deadline=None)
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
    assert [begun.request.token_ids.ids[0] for begun in service.sessions[-1].begun] == [1000]


async def test_nothing_is_sent_before_the_greeting(tmp_path: Path) -> None:
    """A request counts as sent only to a service that answers; a service that only accepts connections does not."""
    service = CountingService()
    service.may_greet.clear()
    async with linked(tmp_path) as link:
        async with serving(tmp_path, service):
            stays, gone = CountedRequest(0, 3), CountedRequest(1000, 3)
            for request in (stays, gone):
                link.submit(request)
            await eventually(lambda: service.sessions)
            await asyncio.sleep(0.05)
            link.abort(gone)
            assert not link.is_up and link.num_messages == 0
        service.may_greet.set()
        async with serving(tmp_path, service):
            await asyncio.wait_for(link.drained(), 10)
    assert stays.received == stays.expected
    (begun,) = service.sessions[-1].begun
    assert not begun.resubmitted


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
    assert [begun.request.token_ids.ids[0] for begun in service.sessions[-1].begun] == [1000 * i for i in range(40)]
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


async def test_a_service_that_takes_long_to_start_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    service = CountingService()
    service.may_greet.clear()
    async with serving(tmp_path, service), linked(tmp_path, recovery_timeout=0.2) as link:
        await eventually(lambda: service.sessions)
        changed = link.changed
        await asyncio.wait_for(changed.wait(), 10)  # it is given up
        with pytest.raises(RpcError, match="is still starting; try again later"):
            link.submit(CountedRequest(0, 3))
        assert not caplog.records
        service.may_greet.set()
        await eventually(lambda: link.is_available)


async def test_requests_for_a_service_that_will_be_started_wait_without_end(tmp_path: Path) -> None:
    async with linked(tmp_path, recovery_timeout=0.1) as link:
        await eventually(lambda: not link.is_available)
        link.set_patient(True)
        waiting, gone = CountedRequest(0, 3), CountedRequest(0, 3)
        link.submit(waiting)
        await asyncio.sleep(0.3)
        assert link.is_available and waiting.error is None
        async with serving(tmp_path, CountingService()):
            await asyncio.wait_for(waiting.has_ended.wait(), 10)
        assert waiting.received == waiting.expected
        await eventually(lambda: not link.is_up)
        link.submit(gone)
        link.set_patient(False)  # the bound counts from now on
        await asyncio.wait_for(gone.has_ended.wait(), 10)
        assert gone.error is not None and "--recovery-timeout" in gone.error.message


async def test_streams_that_break_again_and_again_do_not_prolong_recovery(tmp_path: Path) -> None:
    """A request that kills every service it reaches is not resent for ever; one that has output each time may be."""
    service = CountingService(breaks=[2] * 100_000)  # after the greeting and the first message
    async with serving(tmp_path, service), linked(tmp_path, recovery_timeout=0.3) as link:
        await eventually(lambda: link.is_up)
        request = CountedRequest(0, 3)
        link.submit(request)
        await asyncio.wait_for(request.has_ended.wait(), 10)
        assert request.error is not None and request.error.code is grpc.StatusCode.UNAVAILABLE
        assert len(service.sessions) > 3
        await eventually(lambda: link.is_available)  # new requests may fare better
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


async def test_a_stream_that_lasted_begins_recovery_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for requests that wait for their turn and had no output in the meantime."""
    monkeypatch.setattr(resubmitting_link, "SETTLED_S", 0.1)
    service = CountingService()
    service.running.clear()
    async with linked(tmp_path, recovery_timeout=0.5) as link:
        request = CountedRequest(0, 3)
        for _ in range(3):
            async with serving(tmp_path, service):
                if request.number == 0:
                    link.submit(request)
                await eventually(lambda: service.num_live == 1)
                await asyncio.sleep(0.4)
            await eventually(lambda: not link.is_up)
            await asyncio.sleep(0.1)
        assert request.error is None
        service.running.set()
        async with serving(tmp_path, service):
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
        link.fail_all(RpcError(grpc.StatusCode.UNAVAILABLE, "shutting down"))
        assert [request.error.message for request in requests if request.error] == ["shutting down"] * 3
        await eventually(lambda: service.num_live == 0)


# The server side, with clients that are no links.


def submit_message(*numbers: int) -> ConnectRequest:
    message = ConnectRequest()
    for number in numbers:
        message.requests.add(number=number, request={"token_ids": {"ids": [1000 * number, 3]}})
    return message


@asynccontextmanager
async def connected(directory: Path, service: CountingService) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    """A stream that was greeted."""
    async with serving(directory, service), rpc.channel(f"unix:{directory}/s.sock") as channel:
        call = inference_link_pb2_grpc.InferenceLinkServiceStub(channel).Connect()
        assert await call.read() == ConnectResponse()
        yield call


async def rest_of(call: grpc.aio.StreamStreamCall) -> tuple[dict[int, list[int]], int]:
    """Tokens by number, and how many messages brought them, until the stream ends."""
    tokens: dict[int, list[int]] = {}
    num_messages = 0
    async with asyncio.timeout(10):
        while (message := await call.read()) is not grpc.aio.EOF:
            num_messages += 1
            for one in message.responses:
                tokens.setdefault(one.number, []).extend(one.response.token_ids)
    return tokens, num_messages


async def test_a_client_that_sends_no_more_still_gets_everything(tmp_path: Path) -> None:
    async with connected(tmp_path, CountingService()) as call:
        await call.write(submit_message(1, 2))
        await call.done_writing()
        tokens, _ = await rest_of(call)
    assert tokens == {1: [1000, 1001, 1002], 2: [2000, 2001, 2002]}


async def test_a_client_that_sends_nothing_is_dropped(tmp_path: Path) -> None:
    async with connected(tmp_path, CountingService()) as call:
        await call.done_writing()
        assert await rest_of(call) == ({}, 0)


async def test_the_end_of_an_aborted_request_ends_a_stream_without_another_word(tmp_path: Path) -> None:
    service = CountingService()
    service.running.clear()
    async with connected(tmp_path, service) as call:
        await call.write(submit_message(1))
        await call.done_writing()
        await eventually(lambda: service.num_live == 1)
        await asyncio.sleep(0.05)
        service.sessions[0].step()
        service.sessions[0].abort(1)
        service.sessions[0].abort(99)
        assert await rest_of(call) == ({}, 0)


async def test_a_number_in_use_ends_the_stream_and_all_on_it(tmp_path: Path) -> None:
    service = CountingService()
    service.running.clear()
    async with connected(tmp_path, service) as call:
        await call.write(submit_message(1, 2))
        await eventually(lambda: service.num_live == 2)
        await call.write(submit_message(2))
        with pytest.raises(grpc.aio.AioRpcError, match="request number 2 is in use") as caught:
            await rest_of(call)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert service.num_live == 0


async def test_a_number_is_free_again_after_the_end(tmp_path: Path) -> None:
    service = CountingService()
    async with connected(tmp_path, service) as call:
        await call.write(submit_message(1))
        async with asyncio.timeout(10):
            while not any(one.response.finish_reason for one in (await call.read()).responses):
                pass
        await call.write(submit_message(1))
        await call.done_writing()
        assert (await rest_of(call))[0] == {1: [1000, 1001, 1002]}


async def test_a_client_that_vanishes_leaves_nothing_behind(tmp_path: Path) -> None:
    service = CountingService()
    service.running.clear()
    async with connected(tmp_path, service) as call:
        await call.write(submit_message(1, 2, 3))
        await eventually(lambda: service.num_live == 3)
        call.cancel()
        await eventually(lambda: service.num_live == 0)


async def test_a_stream_that_is_cut_ends_so_whatever_its_reader_says_of_it() -> None:
    """The reader of gRPC raises an error of its own where a server has stopped."""
    may_greet = asyncio.Event()
    may_greet.set()

    async def messages() -> AsyncIterator[ConnectRequest]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("Server already stopped.") from None
        yield ConnectRequest()

    responses = CountingSession(may_greet).responses(messages())
    assert await anext(responses) == ConnectResponse()
    waiting = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(("limit", "num_messages"), [(100_000, 1), (8, 4), (1, 10)])
async def test_what_waits_comes_merged_and_in_messages_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, num_messages: int
) -> None:
    monkeypatch.setattr(session_module, "MAX_PER_MESSAGE", limit)
    service = CountingService()
    service.running.clear()
    async with connected(tmp_path, service) as call:
        await call.write(submit_message(*range(10)))
        await eventually(lambda: service.num_live == 10)
        for _ in range(3):
            service.sessions[0].step()
        await call.done_writing()
        assert await rest_of(call) == ({n: [1000 * n + i for i in range(3)] for n in range(10)}, num_messages)


async def test_a_session_greets_again_on_request(tmp_path: Path) -> None:
    service = CountingService()
    service.running.clear()
    async with connected(tmp_path, service) as call:
        service.sessions[0].outbox.put(None, Tokens([]))
        assert await asyncio.wait_for(call.read(), 10) == ConnectResponse()
        assert service.sessions[0].num_greetings == 2


# The end of a service.

SMALL_WINDOWS = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]


@asynccontextmanager
async def written_late(
    directory: Path, shutdown_timeout: float = 30.0
) -> AsyncIterator[tuple[grpc.aio.StreamStreamCall, asyncio.Task[None]]]:
    """A stream that was greeted, and the stop of its service: one request has ended with more output than a stream
    takes while its client does not read, and another still runs."""
    service = CountingService()
    service.running.clear()
    async with (
        serving(directory, service, "s", shutdown_timeout) as server,
        grpc.aio.insecure_channel(f"unix:{directory}/s.sock", options=SMALL_WINDOWS) as channel,
    ):
        call = inference_link_pb2_grpc.InferenceLinkServiceStub(channel).Connect()
        assert await call.read() == ConnectResponse()
        await call.write(submit_message(1, 2))
        await eventually(lambda: service.num_live == 2)
        (session,) = service.sessions
        for _ in range(3):  # the first is being written when the others come
            session.outbox.put(1, Tokens(list(range(300_000))))
            await asyncio.sleep(0.05)
        session.outbox.put(1, Tokens([7], is_last=True))
        drained = asyncio.sleep(0)
        yield call, asyncio.create_task(server.stop(lambda: drained, service.draining.finish_streams))


async def test_the_last_output_is_read_though_the_service_ends(tmp_path: Path) -> None:
    """The request has ended at the service, and no other would have its last token."""
    async with written_late(tmp_path) as (call, stopping):
        done, _ = await asyncio.wait([stopping], timeout=0.3)
        assert not done, "it waits for its client"
        await call.write(submit_message(3))
        async with rpc.channel(f"unix:{tmp_path}/s.sock") as channel:
            late = inference_link_pb2_grpc.InferenceLinkServiceStub(channel).Connect()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(late.read(), 0.2)  # no greeting: it would carry requests
        tokens, _ = await rest_of(call)
        assert len(tokens[1]) == 900_001 and tokens[1][-1] == 7
        assert tokens.keys() == {1}, "its client resubmits what still ran"
        assert await call.code() is grpc.StatusCode.OK
        await asyncio.wait_for(stopping, 10)


async def test_a_client_that_does_not_read_does_not_keep_a_service(tmp_path: Path) -> None:
    async with written_late(tmp_path, shutdown_timeout=0.1) as (call, stopping):
        await asyncio.wait_for(stopping, 10)
        with pytest.raises(grpc.aio.AioRpcError):
            await rest_of(call)

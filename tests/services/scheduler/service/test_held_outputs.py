"""Outputs of two short steps reach clients together, complete and in order; first and last ones are never held."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.service import held_outputs
from pagewire.services.scheduler.service.held_outputs import HeldOutputs
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.v1.common_pb2 import SamplingParams
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest
from tests.fakes import FakeExecutorServicer
from tests.services.scheduler.service.test_service import output_of, prompt_of
from tests.services.scheduler.service_line import Collected, ServiceLine, token_submission

NUM_REQUESTS = 4


class Client:
    """The requests of a client, and what it receives."""

    def __init__(self) -> None:
        self.requests = [Request(number, [7], SamplingParams(), []) for number in range(NUM_REQUESTS)]
        self.received: dict[int, list[int]] = {number: [] for number in range(NUM_REQUESTS)}
        self.held = HeldOutputs(self.deliver)
        self.has_delivered = asyncio.Event()

    def deliver(self) -> None:
        if (outputs := self.held.take()) is None:
            return
        start = 0
        for request, num_tokens in zip(outputs.requests, outputs.num_tokens, strict=True):
            self.received[request.request_id] += outputs.token_ids[start : start + num_tokens]
            start += num_tokens
        assert start == len(outputs.token_ids)
        self.has_delivered.set()

    async def gain(self, num_tokens: dict[int, int], *, ends: bool = False) -> None:
        """Takes in a result, in which each of these requests gains so many tokens; leaves it to the event loop."""
        self.held.deliver_due()
        outputs = Outputs()
        for number, count in num_tokens.items():
            request = self.requests[number]
            new = [len(request.token_ids) + index for index in range(count)]
            request.token_ids += new
            outputs.requests.append(request)
            outputs.num_tokens.append(count)
            outputs.token_ids += new
            if ends:
                outputs.ends.append((request, FinishReason.LENGTH))
        self.held.add(outputs)
        await asyncio.sleep(0)

    @property
    def num_missing(self) -> int:
        """The number of tokens that the client has not received."""
        return sum(len(one.token_ids) - 1 - len(self.received[one.request_id]) for one in self.requests)


@pytest.fixture
def all_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step counts as short, however slow this machine is."""
    monkeypatch.setattr(held_outputs, "SHORT_STEP_S", float("inf"))
    monkeypatch.setattr(held_outputs, "MAX_HOLD_S", 60.0)


@pytest.mark.usefixtures("all_short")
async def test_a_token_in_the_middle_comes_with_the_next_one() -> None:
    client = Client()
    await client.gain({0: 1})
    assert client.num_missing == 0, "the first one"
    for _ in range(3):
        await client.gain({0: 1})
        assert client.num_missing == 1
        await client.gain({0: 1})
        assert client.num_missing == 0
    await client.gain({0: 1})
    await client.gain({0: 1, 1: 1})
    assert client.num_missing == 0, "the first one of another request"
    await client.gain({0: 1}, ends=True)
    assert client.num_missing == 0, "the last one"


async def test_a_token_does_not_wait_for_a_late_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_outputs, "SHORT_STEP_S", float("inf"))
    client = Client()
    await client.gain({0: 1})
    client.has_delivered.clear()
    await client.gain({0: 1})
    async with asyncio.timeout(10):
        await client.has_delivered.wait()
    assert client.num_missing == 0


async def test_tokens_of_long_steps_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_outputs, "SHORT_STEP_S", 0.0)
    client = Client()
    for _ in range(4):
        await client.gain({0: 1, 1: 2})
        assert client.num_missing == 0


@given(st.lists(st.tuples(st.dictionaries(st.integers(0, NUM_REQUESTS - 1), st.integers(1, 3)), st.booleans())))
def test_all_tokens_come_once_and_in_order(results: list[tuple[dict[int, int], bool]]) -> None:
    async def run() -> None:
        client = Client()
        for num_tokens, ends in results:
            await client.gain(num_tokens, ends=ends)
        client.deliver()
        assert client.received == {one.request_id: one.token_ids[1:] for one in client.requests}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_outputs, "SHORT_STEP_S", float("inf"))
        asyncio.run(run())


@pytest.mark.usefixtures("all_short")
async def test_streams_are_whole_when_an_executor_dies_with_held_tokens(tmp_path: Path) -> None:
    async with ServiceLine(tmp_path, FakeExecutorServicer()).running() as line:
        call = line.link.Connect()
        requests = [token_submission(number, prompt_of(number), max_tokens=30) for number in range(3)]
        await call.write(SchedulerLinkServiceConnectRequest(requests=requests))
        line.executor.fail_after(7)
        collected = Collected()
        await collected.read_until_finished(call, 0, 1, 2)
        assert collected.token_ids == {number: output_of(number, 30) for number in range(3)}
        assert line.executor.num_streams > 1

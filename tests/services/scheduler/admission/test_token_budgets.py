"""Tokens per minute of a tenant, by a clock of the test's, and what clients of the scheduler are told."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.config.sampling_checks import resolve
from pagewire.services.scheduler.admission.admission import WaitTooLong
from pagewire.services.scheduler.admission.token_budgets import TokenBudgets
from pagewire.services.scheduler.main import make_public_server
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.values.tenant import Tenant
from pagewire.tools.keys import KeysAddConfig, add
from pagewire.v1 import scheduler_pb2_grpc
from pagewire.v1.common_pb2 import SamplingParams
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError
from tests.fakes import FakeExecutorServicer
from tests.services.scheduler.service_line import ServiceLine, generate_request


class Clock:
    """Budgets, and what time it is."""

    def __init__(self) -> None:
        self.budgets, self.now, self._num = TokenBudgets(), 1000.0, 0

    def ask(self, num_tokens: int, tenant: str = "a", limit: int = 60, **options: Any) -> Request:
        """Raises WaitTooLong."""
        request = self._check(num_tokens, tenant, limit, **options)
        self.budgets.add(request)
        return request

    def wait(self, limit: int = 60) -> float:
        """Seconds that a request would have to come later."""
        try:
            self._check(1, "a", limit)
        except WaitTooLong as error:
            return error.retry_delay
        return 0.0

    def _check(self, num_tokens: int, tenant: str, limit: int, **options: Any) -> Request:
        self._num += 1
        params = resolve(SamplingParams())
        request = Request(
            self._num, [1] * num_tokens, params, tenant=Tenant(tenant, tokens_per_minute=limit), **options
        )
        self.budgets.check(request, self.now)
        return request


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_prompts_count_when_they_are_let_in(clock: Clock) -> None:
    clock.ask(40)
    clock.ask(19)
    clock.ask(1)
    with pytest.raises(WaitTooLong, match=r"a has used 60 tokens a minute.* in 1 s") as refused:
        clock.ask(1)
    clock.now += refused.value.retry_delay - 0.01
    with pytest.raises(WaitTooLong):
        clock.ask(1)
    clock.now += 0.02
    clock.ask(1)
    clock.ask(1, tenant="b")


def test_what_is_taken_beyond_the_limit_is_paid_back(clock: Clock) -> None:
    clock.ask(600)
    with pytest.raises(WaitTooLong) as refused:
        clock.ask(1)
    assert refused.value.retry_delay == pytest.approx(541)
    clock.now += 3600
    clock.ask(60)
    with pytest.raises(WaitTooLong):
        clock.ask(1)


def test_outputs_count_as_they_come_and_at_the_end(clock: Clock) -> None:
    running, short = clock.ask(10), clock.ask(10)
    running.token_ids += [1] * 30
    assert clock.wait() == 0
    running.token_ids += [1] * 29
    short.token_ids += [1] * 5
    clock.budgets.remove(short)
    assert clock.wait() == pytest.approx(25)
    clock.budgets.remove(running)
    clock.budgets.remove(running)
    assert clock.wait() == pytest.approx(25), "nothing counts twice"


def test_choices_are_let_in_with_the_first_and_earlier_outputs_are_free(clock: Clock) -> None:
    clock.ask(60)
    clock.ask(60, is_resubmitted=True)
    clock.ask(1, is_resubmitted=True, resume_token_ids=[1] * 500)
    with pytest.raises(WaitTooLong) as refused:
        clock.ask(1)
    assert refused.value.retry_delay == pytest.approx(62)


def test_a_limit_may_change_and_go(clock: Clock) -> None:
    clock.ask(60)
    assert clock.wait(limit=6000) == pytest.approx(0.01, abs=0.01)
    clock.ask(1000, limit=0)
    clock.ask(60)


async def test_clients_learn_when_to_come_back(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    few = add(keys, KeysAddConfig(name="few", tokens_per_minute=30))
    config = {"public_listen": f"unix:{tmp_path}/public.sock", "api_key_file": str(keys)}
    async with ServiceLine(tmp_path, FakeExecutorServicer(), **config).running() as line:
        server = make_public_server(line.config, line.engine)
        await server.start()
        async with rpc.channel(line.config.public_listen) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            metadata = (("authorization", f"Bearer {few}"),)
            request = generate_request(range(20), max_tokens=40, ignore_eos=True)
            responses = [response async for response in stub.Generate(request, metadata=metadata)]
            assert sum(len(response.token_ids) for response in responses) == 40
            with pytest.raises(grpc.aio.AioRpcError, match="few has used 30 tokens a minute") as refused:
                await stub.Generate(request, metadata=metadata).read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            retry_delay = RpcError.from_call(refused.value).retry_delay
            assert retry_delay is not None and 0 < retry_delay <= 62
        await server.stop()

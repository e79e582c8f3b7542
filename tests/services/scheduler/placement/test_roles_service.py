"""Prompts that are computed on one executor and go on at another, over real gRPC with fake executors."""

import random
from pathlib import Path

from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest
from tests.fakes import FakeExecutor, FakeExecutorServicer, FakeTier, expected_output
from tests.services.scheduler.service_line import Collected, ServiceLine, generate_request, token_submission


def servicer(role: str, step_seconds: float = 0.0) -> FakeExecutorServicer:
    def make() -> FakeExecutor:
        made = FakeExecutor(block_size=4, max_num_batched_tokens=64, tier=None if role == "decode" else FakeTier())
        made.role = role
        return made

    return FakeExecutorServicer(make, step_seconds=step_seconds)


def line_of(directory: Path, *roles: str, step_seconds: float = 0.0) -> ServiceLine:
    line = ServiceLine(directory, *(servicer(role, step_seconds) for role in roles))
    connect(line)
    return line


def connect(line: ServiceLine) -> None:
    """Lets each executor reach the tiers of the others."""
    tiers = {address: one.executor.tier for address, one in zip(line.executor_addresses, line.executors, strict=True)}
    for one in line.executors:
        one.sources = {address: tier for address, tier in tiers.items() if tier is not None}


def prompt_of(number: int) -> list[int]:
    return [(number * 37 + i) % 900 for i in range(150)]


async def test_a_stream_goes_on_elsewhere(tmp_path: Path) -> None:
    async with line_of(tmp_path, "prefill", "decode").running() as line:
        await line.wait_for_executors(2)
        responses = [
            one async for one in line.stub.Generate(generate_request(prompt_of(1), external_id="r", max_tokens=9))
        ]
        token_ids = [token_id for response in responses for token_id in response.token_ids]
        assert token_ids == expected_output(prompt_of(1), 9, vocab_size=1000)
        assert [one.executor.num_executed_tokens for one in line.executors] == [150, 2 + 1 + 7]
        stub = admin_pb2_grpc.AdminServiceStub(line.channel)
        (account,) = (await stub.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id="r"))).accounts
        phases = [(phase.name, phase.executor) for phase in account.phases]
        assert phases[:2] == [("queue", ""), ("prefill", "executor-0")]
        assert phases[-1] == ("decode", "executor-1") and account.first_token_seconds > 0
        await line.wait_until_free()


async def test_whichever_executor_dies_streams_go_on(tmp_path: Path) -> None:
    """Deaths come at moments from a seed, each followed by a successor; with too many, requests would be the cause."""
    chance, count, max_tokens = random.Random(7), 12, 60
    async with line_of(tmp_path, "prefill", "decode", step_seconds=0.002).running() as line:
        await line.wait_for_executors(2)
        for index in (0, 1, 0, 1):
            call, collected = line.link.Connect(), Collected()
            submissions = [token_submission(n, prompt_of(n), max_tokens=max_tokens) for n in range(count)]
            await call.write(SchedulerLinkServiceConnectRequest(requests=submissions))
            num_tokens = chance.randint(1, count * max_tokens // 2)
            while sum(map(len, collected.token_ids.values())) < num_tokens:
                collected.add(await call.read())
            await line.kill_executor(index)
            await line.start_executor(servicer(("prefill", "decode")[index], 0.002), index)
            connect(line)
            await collected.read_until_finished(call, *range(count))
            for number in range(count):
                assert collected.token_ids[number] == expected_output(prompt_of(number), max_tokens, vocab_size=1000)
        await line.wait_until_free()

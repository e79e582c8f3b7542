"""The phases of requests, which add up to their time, and the spans of them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from pagewire.telemetry import spans
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.v1.admin_pb2 import RequestAccount
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest as Connect
from tests.fakes import FakeExecutor, FakeExecutorServicer
from tests.services.scheduler.service_line import Collected, ServiceLine, generate_request, token_submission

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", provider.get_tracer("test"))
    return exporter


async def accounts(line: ServiceLine, request_id: str, tenant: str | None = None) -> Sequence[RequestAccount]:
    stub = admin_pb2_grpc.AdminServiceStub(line.channel)
    request = admin_pb2.ExplainRequestRequest(request_id=request_id, tenant=tenant)
    return (await stub.ExplainRequest(request)).accounts


def assert_adds_up(account: RequestAccount) -> None:
    at = 0.0
    for phase in account.phases:
        assert phase.start_seconds == pytest.approx(at, abs=1e-6) and phase.seconds >= 0
        at += phase.seconds
    assert at == pytest.approx(account.seconds, abs=1e-6)


@pytest.mark.parametrize("max_draft_tokens", [0, 4])
async def test_a_prompt_in_parts_then_an_output(
    tmp_path: Path, exporter: InMemorySpanExporter, max_draft_tokens: int
) -> None:
    executor = FakeExecutorServicer(
        lambda: FakeExecutor(max_num_batched_tokens=16, max_draft_tokens=max_draft_tokens), step_seconds=0.002
    )
    async with ServiceLine(tmp_path, executor, long_prefill_token_threshold=0).running() as line:
        request = generate_request(range(1, 41), external_id="mine-0", max_tokens=5)
        call = line.stub.Generate(request, metadata=[("traceparent", TRACEPARENT)])
        assert len([response async for response in call]) >= 1
        [account] = await accounts(line, "mine")
        assert not await accounts(line, "min") and not await accounts(line, "mine", "somebody")
    assert_adds_up(account)
    assert [phase.name for phase in account.phases] == ["queue", "prefill", "decode"]
    _, prefill, decode = account.phases
    assert (prefill.num_tokens, prefill.num_chunks, decode.num_tokens) == (40, 3, 5)
    assert {prefill.executor, decode.executor} == {"executor-0"}
    assert account.usage.prompt_tokens == 40 and account.usage.completion_tokens == 5
    assert 0 < account.first_token_seconds < account.seconds
    assert account.finish_reason == "length" and account.trace_id == TRACEPARENT[3:35]

    spans = exporter.get_finished_spans()
    [server] = [span for span in spans if span.kind is SpanKind.SERVER]
    assert f"{server.context.trace_id:032x}" == account.trace_id
    assert server.attributes is not None and server.attributes["rpc.method"] == "pagewire.v1.SchedulerService/Generate"
    assert server.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert server.status.is_ok and [event.name for event in server.events] == ["first token"]
    children = [span for span in spans if span is not server]
    assert Counter(span.name for span in children) == {"decode": 1, "prefill": 1, "prefill chunk": 3, "queue": 1}
    assert all(span.parent is not None and span.parent.span_id == server.context.span_id for span in children)
    first, last = interval(server)
    slack = 1_000_000  # clocks are read one after the other
    assert all(first - slack <= interval(one)[0] <= interval(one)[1] <= last + slack for one in children)


def interval(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None and span.end_time is not None
    return span.start_time, span.end_time


async def test_losses_and_preemptions_have_their_time(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    """Blocks suffice for one and a half requests: one waits for blocks, and all wait after the executor is lost."""
    executor = FakeExecutorServicer(lambda: FakeExecutor(num_blocks=12, block_size=4), step_seconds=0.001)
    async with ServiceLine(tmp_path, executor, enable_prefix_caching=False).running() as line:
        call = line.link.Connect()
        requests = [
            token_submission(number, range(1, 9), external_id=f"r-{number}", max_tokens=24) for number in range(3)
        ]
        await call.write(Connect(requests=requests))
        collected = Collected()
        while sum(map(len, collected.token_ids.values())) < 6:
            collected.add(await call.read())
        line.executor.fail_after(1)
        await collected.read_until_finished(call, 0, 1, 2)
        found = await accounts(line, "r")
    names = [phase.name for account in found for phase in account.phases]
    assert "preempted" in names and "recovery" in names
    for account in found:
        assert_adds_up(account)
        assert sum(phase.num_tokens for phase in account.phases if phase.name == "decode") >= 24
        assert account.phases[-1].name == "decode"

"""Metrics of steps and spans of traced requests."""

from dataclasses import replace

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import REGISTRY

from pagewire.services.executor.stats import RequestSpans, record_drafts, step_kind
from pagewire.services.executor.step.step import HostTokens, NewRequest, Step
from pagewire.telemetry import spans
from pagewire.telemetry.trace import Trace
from tests.services.executor.helpers.stepping import GREEDY

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


def step_of(*counts: int) -> Step:
    return Step(
        step_id=1,
        request_ids=list(range(len(counts))),
        num_scheduled_tokens=np.array(counts, dtype=np.int64),
        num_new_blocks=np.zeros((len(counts), 1), dtype=np.int64),
        new_block_ids=np.empty(0, dtype=np.int32),
    )


def test_step_kinds():
    assert [step_kind(step_of(*counts)) for counts in ((), (1, 1), (5, 2), (1, 5))] == [
        "empty",
        "decode",
        "prefill",
        "mixed",
    ]


def test_drafts_are_counted_by_place():
    """Counts drafts of three requests: all of two drafts were right, one of three was, and the third had none."""

    def counts() -> list[float]:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        values = [REGISTRY.get_sample_value(f"pagewire:spec_decode_num_{name}_total") for name in names]
        name = "pagewire:spec_decode_num_accepted_tokens_per_pos_total"
        values += [REGISTRY.get_sample_value(name, {"position": str(position)}) for position in range(3)]
        return [value or 0.0 for value in values]

    before = counts()
    gained = np.array([3, 2, 1])
    record_drafts(HostTokens(gained, np.zeros(6, dtype=np.int64), num_drafted=np.array([2, 3, 0])))
    record_drafts(HostTokens(np.array([1]), np.zeros(1, dtype=np.int64)))
    assert np.subtract(counts(), before).tolist() == [2, 5, 3, 2, 1, 0]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", provider.get_tracer("test"))
    return exporter


def new_request(request_id: int, traceparent: str) -> NewRequest:
    return NewRequest(
        request_id, np.empty(0, dtype=np.int32), 1, 0, [], GREEDY, Trace(traceparent, "vendor=1" if traceparent else "")
    )


def test_a_traced_request_has_one_span_from_its_first_step_to_its_end(exporter: InMemorySpanExporter):
    spans = RequestSpans()
    traced = new_request(3, f"00-{TRACE_ID}-b7ad6b7169203331-01")
    spans.update(replace(step_of(4, 4), new_requests=[traced, new_request(4, "")]))
    spans.update(step_of(1, 1))
    assert not exporter.get_finished_spans()
    spans.update(replace(step_of(), finished_request_ids=[3, 4]))
    (span,) = exporter.get_finished_spans()
    assert span.name == "execute" and f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.context.trace_state.get("vendor") == "1"
    assert span.attributes is not None
    assert span.attributes["pagewire.request_id"] == 3 and span.attributes["rpc.response.status_code"] == "OK"
    assert span.status.is_ok


def test_spans_end_with_the_stream(exporter: InMemorySpanExporter):
    spans = RequestSpans()
    spans.update(replace(step_of(4), new_requests=[new_request(3, f"00-{TRACE_ID}-b7ad6b7169203331-01")]))
    spans.end_all("superseded by a new stream")
    (span,) = exporter.get_finished_spans()
    assert span.status.description == "superseded by a new stream"
    spans.end_all("again")
    assert len(exporter.get_finished_spans()) == 1

"""Spans and metrics of requests."""

import grpc
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram

from pagewire.services.tokenizer import stats
from pagewire.v1 import inference_pb2
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from tests.services.tokenizer.service.answers import code_of, read_all
from tests.services.tokenizer.service_line import Gateway


@pytest.mark.parametrize("labels", [{}, {"b": "x", "a": "y"}], ids=["plain", "labelled"])
def test_the_latency_histogram_is_an_ordinary_one(labels: dict[str, str]) -> None:
    buckets = (0.1, 1, 2.5, 1048576)
    ours = stats.LoopHistogram("test:ours", "Both.", buckets, list(labels))
    theirs = Histogram("test:theirs", "Both.", list(labels), registry=CollectorRegistry(), buckets=buckets)
    try:
        for value in (0.05, 0.1, 0.5, 2.5, 7.0):
            ours.labels(*labels.values()).observe(value)
            (theirs.labels(*labels.values()) if labels else theirs).observe(value)
        (family,) = ours.collect()
        (expected,) = theirs.collect()
    finally:
        REGISTRY.unregister(ours)
    wanted = [(s.name.removeprefix("test:theirs"), s.labels, s.value) for s in expected.samples]
    assert [(s.name.removeprefix("test:ours"), s.labels, s.value) for s in family.samples] == [
        sample for sample in wanted if sample[0] != "_created"
    ]
    assert family.type == expected.type


async def test_a_defect_while_encoding_ends_the_spans(make_line, pool, spans, monkeypatch) -> None:
    async def encode_text(text: str, **kwargs) -> list[int]:
        raise RuntimeError("the tokenizer failed")

    monkeypatch.setattr(pool, "encode_text", encode_text)
    async with make_line().running(pool=pool) as line:
        assert (await code_of(line.generate(text=1000 * "x")))[0] == grpc.StatusCode.INTERNAL
    ended = {span.name: span.status.description for span in spans.get_finished_spans()}
    assert ended == {
        "encode": "the tokenizer failed",
        "text_completion SmolLM2-135M-Instruct.Q4_1": "RuntimeError: the tokenizer failed",
    }


async def test_spans_join_the_callers_trace_and_the_schedulers(make_line, pool, spans) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traceparent = f"00-{trace_id}-{parent_id}-01"
    async with make_line().running(pool=pool) as line:
        call = line.stub.Generate(inference_pb2.GenerateRequest(text="x"), metadata=[("traceparent", traceparent)])
        await read_all(call)
        gateway = Gateway(line)
        await gateway.send({1: GenerateSubmission(request={"text": "x"}, context={"traceparent": traceparent})})
        await gateway.read_until_finished(1)
        forwarded = [submission.context.traceparent for submission in line.scheduler.submissions]
    ended = spans.get_finished_spans()
    generates = [span for span in ended if span.name.startswith("text_completion ")]
    encodes = [span for span in ended if span.name == "encode"]
    assert len(generates) == len(encodes) == 2
    for generate, encode, sent in zip(generates, encodes, forwarded, strict=True):
        assert f"{generate.context.trace_id:032x}" == trace_id
        assert f"{generate.parent.span_id:016x}" == parent_id
        assert encode.parent.span_id == generate.context.span_id
        assert sent == f"00-{trace_id}-{generate.context.span_id:016x}-01"
        assert generate.attributes["gen_ai.usage.input_tokens"] == 1
        assert generate.attributes["gen_ai.response.finish_reasons"] == ("stop",)
        assert generate.attributes["rpc.method"] == "pagewire.v1.InferenceService/Generate"

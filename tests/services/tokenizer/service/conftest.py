from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pagewire.telemetry import spans as telemetry
from tests.services.tokenizer.service.answers import TEXT
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine


@pytest.fixture
def tokens(smollm2):
    return lambda text: smollm2.encode(text, add_special_tokens=False)


@pytest.fixture
def make_line(tmp_path: Path, smollm2_gguf: Path, tokens):
    def make(text: str = TEXT, *, config: dict | None = None, eos: bool = True, **scheduler) -> TokenizerLine:
        output = tokens(text) + [EOS] * eos
        fake = FakeScheduler(scheduler.pop("script", lambda request: output), **scheduler)
        return TokenizerLine(tmp_path, fake, smollm2_gguf, **(config or {}))

    return make


@pytest.fixture
def spans(monkeypatch) -> InMemorySpanExporter:
    """The spans that ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    return exporter

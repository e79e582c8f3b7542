"""A gateway under uvicorn on a loopback port, before a fake tokenizer service on a unix socket."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pagewire import telemetry
from pagewire.config import GatewayConfig
from pagewire.gateway import main
from tests.gateway.fake_tokenizer import FakeTokenizer


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the state of a service, not of this test
            await asyncio.sleep(0.005)


async def wait_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "pagewire.gateway.middleware"]


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What tracing would send."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "_tracer", provider.get_tracer("test"))
    return exporter


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/tokenizer.sock"


@pytest.fixture
async def fake(address: str) -> AsyncIterator[FakeTokenizer]:
    service = FakeTokenizer()
    await service.start(address)
    yield service
    service.running.set()
    await service.stop()


@asynccontextmanager
async def running_gateway(
    address: str, leave: asyncio.Event | None = None, send_buffer: int | None = None, **overrides: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a gateway that shuts down with the block, or as soon as `leave` is set."""
    directory = Path(address.removeprefix("unix:")).parent
    settings = {"port": 0, "tokenizer_address": address, "shutdown_timeout": 0.2, "data_dir": str(directory / "data")}
    settings |= overrides
    config = GatewayConfig(**settings)
    sock = main.listen(config)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    leave = leave or asyncio.Event()
    task = asyncio.create_task(main.serve(config, sock, leave.wait()))
    base_url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=base_url, timeout=20) as client:
            yield client
    finally:
        leave.set()
        await task


@pytest.fixture
async def client(fake: FakeTokenizer, address: str) -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway(address) as http:
        await wait_ready(http)
        yield http


@pytest.fixture
async def ai(client: httpx.AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=0) as official:
        yield official

"""A gateway under uvicorn on a loopback port, before a tokenizer service on a unix socket: a fake one, mostly."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pagewire.config import GatewayConfig
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.gateway import main
from pagewire.gateway.app import with_routes
from pagewire.gateway.http.connection_limits import Limits
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.telemetry import spans
from pagewire.v1.scheduler_pb2 import TokenRequest
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.services.tokenizer.chat_templates import FAMILIES
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the state of a service, not of this test
            await asyncio.sleep(0.005)


async def wait_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(10):
        while (await client.get("/readyz")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# Clients without TLS need not parse the system's certificates, which takes a processor 30 ms each time.


def plain_http(base_url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=base_url, timeout=20, verify=False)


def openai_client(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
    """Returns the official client of the gateway that `client` asks."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=0, http_client=http)


def anthropic_client(client: httpx.AsyncClient) -> anthropic.AsyncAnthropic:
    """Returns Anthropic's client of the gateway that `client` asks."""
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=str(client.base_url), api_key="any", max_retries=0, http_client=http)


def access_lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "pagewire.gateway.core.middleware"]


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    """The answer of /openapi.json, made once."""
    answer: dict[str, Any] = json.loads(json.dumps(with_routes().openapi()))
    return answer


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans that tracing would send."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(spans, "_tracer", provider.get_tracer("test"))
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
    address: str,
    leave: asyncio.Event | None = None,
    send_buffer: int | None = None,
    limits: Limits | None = None,
    drains: bool = True,
    **overrides: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a gateway that shuts down with the block, or as soon as `leave` is set. drains: as after
    SIGTERM, not after Ctrl-C."""
    directory = Path(address.removeprefix("unix:")).parent
    settings = {"port": 0, "tokenizer_address": address, "shutdown_timeout": 0.2, "data_dir": str(directory / "data")}
    settings |= overrides
    config = GatewayConfig(**settings)
    sock = main.listen(config)
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    leave = leave or asyncio.Event()

    async def signalled() -> bool:
        await leave.wait()
        return drains

    task = asyncio.create_task(main.serve(config, sock, signalled(), limits))
    base_url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        async with plain_http(base_url) as client:
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
    async with openai_client(client) as official:
        yield official


# Instead of the fake: a real tokenizer service, for a model that generates what a test sets, in the marks of Qwen3.


@pytest.fixture(scope="session")
def pool(smollm2_gguf: Path):
    pool = TokenizerPool(FileSource(str(smollm2_gguf), chat_template=FAMILIES["qwen3"]), size=1)
    yield pool
    pool.close()


class Model:
    """Answers every request with `output`."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self.output = ""
        self._tokenizer = tokenizer
        self.scheduler = FakeScheduler(self.tokens)

    def tokens(self, request: TokenRequest) -> list[int]:
        return [*self.encode(self.output), EOS]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    @property
    def prompt(self) -> str:
        """The last one."""
        token_ids = self.scheduler.requests[-1].prompt_token_ids
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


@pytest.fixture
def model(smollm2: LoadedTokenizer) -> Model:
    return Model(smollm2)


@pytest.fixture
def line(tmp_path: Path, smollm2_gguf: Path, model: Model) -> TokenizerLine:
    return TokenizerLine(tmp_path, model.scheduler, smollm2_gguf, served_model_name="m")


@pytest.fixture
async def http(line: TokenizerLine, pool: TokenizerPool) -> AsyncIterator[httpx.AsyncClient]:
    async with line.running(pool=pool), running_gateway(line.config.listen) as client:
        await wait_ready(client)
        yield client

"""The services joined by TCP, as on several hosts, each with a certificate of one CA."""

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from pagewire.client import Client
from pagewire.config import TlsConfig
from pagewire.wire import health, rpc
from pagewire.wire.secure_rpc import ServiceTls
from tests.e2e.conftest import QUICK_EXECUTOR_FLAGS
from tests.e2e.line import FULL_NAMES, Line, free_port
from tests.makers.certificates import Authority, Issued

OPTIONS: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0}
IGNORE_EOS = {"ignore_eos": True}
REQUEST: dict[str, Any] = {"model": "m", "prompt": "The sea", "extra_body": IGNORE_EOS} | OPTIONS


class SecureLine(Line):
    """All addresses are of TCP; processes and tests have the same certificate."""

    def __init__(self, directory: Path, model: Path, tokenizer: Path, issued: Issued) -> None:
        public = f"localhost:{free_port()}"
        flags = ["--public-listen", public, "--tokenizer", str(tokenizer)]
        super().__init__(directory, str(model), executor=QUICK_EXECUTOR_FLAGS, tokenizer=flags)
        self.issued = issued
        self.public = public
        self.environment = {f"PAGEWIRE_{name.upper()}": path for name, path in issued.flags.items()}
        self.verify = ssl.create_default_context(cafile=str(issued.ca_certs))
        self._addresses = {name: f"localhost:{free_port()}" for name in FULL_NAMES}

    def address(self, service: str) -> str:
        return self._addresses.get(service, "")

    def channel(self, service: str) -> grpc.aio.Channel:
        return ServiceTls(TlsConfig(**self.issued.flags), ["localhost:1"]).channel(self.address(service))

    @property
    def base_url(self) -> str:
        return f"https://localhost:{self.port}"


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, quick_model: Path, smollm2_gguf: Path) -> Iterator[SecureLine]:
    directory = tmp_path_factory.mktemp("tls")
    line = SecureLine(directory, quick_model, smollm2_gguf, Authority(directory).issue("line"))
    try:
        for service in ("executor", "scheduler", "tokenizer", "gateway"):
            line.start(service)
        asyncio.run(line.wait_ready())
        yield line
    finally:
        line.stop()


async def test_rest_and_grpc_answer_and_links_take_services_alone(line: SecureLine) -> None:
    async with line.openai() as ai:
        text = (await ai.completions.create(**REQUEST)).choices[0].text
    files = {"ssl_ca_certs": str(line.issued.ca_certs)}
    async with Client(f"grpcs://{line.public}", **files) as client:
        assert (
            "".join([response.text async for response in client.generate("The sea", **OPTIONS, **IGNORE_EOS)]) == text
        )
    for service, name in FULL_NAMES.items():
        # What clients may connect with is not enough, and plain text is not.
        async with Client(f"grpcs://{line.address(service)}", **files) as client:
            with pytest.raises(rpc.RpcError):
                await client.models()
        assert await asyncio.to_thread(health.grpc_problem, line.address(service), name) is not None
        problem = await asyncio.to_thread(health.grpc_problem, line.address(service), name, line.issued.files)
        assert problem is None
    async with httpx.AsyncClient(verify=line.verify) as client:
        status = (await client.get(f"{line.base_url}/v1/status")).json()
    assert [service["service"] for service in status["services"]] == ["gateway", "tokenizer", "scheduler", "executor"]


async def test_a_stream_goes_on_when_services_die(line: SecureLine) -> None:
    """Every link breaks once."""
    async with line.openai() as ai:
        undisturbed = (await ai.completions.create(**REQUEST)).choices[0].text
        text, num_chunks = "", 0
        async for chunk in await ai.completions.create(**REQUEST, stream=True):
            text += chunk.choices[0].text
            num_chunks += 1
            if dying := {3: "scheduler", 12: "tokenizer"}.get(num_chunks):
                line.restart(dying)
    assert text == undisturbed
    assert num_chunks > 12

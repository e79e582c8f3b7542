"""Several models in one stack: whatever dies while they load, sleep, wake or make room, no answer is another's."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
import yaml

from pagewire.files.tokenizer_files.loading import load_tokenizer
from tests.e2e.conftest import short_directory
from tests.e2e.line import NO_CERTIFICATES, REPOSITORY, free_port
from tests.e2e.stack.test_serve import is_ready
from tests.services.executor.models.tiny import save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("a", "b", "c")
ROOM = 2  # models that may be awake
NUM_TOKENS = 200
KINDS = ("tokenizer", "scheduler", "executor")
Log = Path


@dataclass
class Stack:
    """`pagewire serve` of all NAMES on demand, of which ROOM are awake. texts: of each model, undisturbed."""

    process: psutil.Process
    port: int
    directory: Path
    log: Log
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def service(self, kind: str, model: str = "") -> psutil.Process | None:
        """Returns the process of a kind, of a model's line; None while there is none."""
        number = NAMES.index(model) if model else 0
        directory = self.directory / str(number) if number else self.directory
        for child in self.process.children():
            try:
                command = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            own = not model or f"--listen=unix:{directory}/{kind}.sock" in command
            if own and kind in command[:6]:
                return child
        return None

    async def kill(self, kind: str, model: str = "") -> None:
        """Kills a process as soon as there is one."""
        async with asyncio.timeout(60):
            while (found := self.service(kind, model)) is None:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.01)
        found.kill()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Stack]:
    models = tmp_path_factory.mktemp("models")
    for number, name in enumerate(NAMES):  # their ranges make them different models
        save_tiny(
            models / name, "Llama", vocab_size=49152, max_position_embeddings=512, initializer_range=0.3 + number / 10
        )
        load_tokenizer(smollm2_gguf).backend.save(str(models / name / "tokenizer.json"))
    entries = [{"name": name, "model": str(models / name)} for name in NAMES]
    file = models / "models.yaml"
    file.write_text(yaml.safe_dump({"models": entries}))
    port, log = free_port(), models / "serve.log"
    command = [sys.executable, "-m", "pagewire.cli", "serve", "--models", str(file), "--port", str(port)]
    command += ["--grpc-port", str(free_port()), "--dtype", "float32", "--num-gpu-blocks-override", "200"]
    command += ["--max-loaded-models", str(ROOM), "--tokenizer", str(smollm2_gguf), "--max-num-seqs", "8"]
    command += ["--max-num-batched-tokens", "128", "--max-queue-time", "0", "--data-dir", str(models / "data")]
    with short_directory() as directory, log.open("wb") as out:
        command += ["--uds-dir", directory]
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + 120
            while not is_ready(port):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            yield Stack(psutil.Process(process.pid), port, Path(directory).resolve(), log)
        finally:
            process.terminate()
            process.wait(60)


class Client:
    """A client of the stack: repeats a request that lost its connection."""

    def __init__(self, stack: Stack, client: httpx.AsyncClient) -> None:
        self._stack, self._client = stack, client

    async def text(self, model: str) -> str:
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "temperature": 0}
        headers = {"Idempotency-Key": uuid4().hex}
        while True:
            text, is_done = "", False
            try:
                url = f"{self._stack.url}/v1/completions"
                content = body | {"stream": True, "ignore_eos": True}
                async with self._client.stream("POST", url, json=content, headers=headers) as answer:
                    if answer.status_code != 200:
                        pytest.fail(f"{model}: HTTP {answer.status_code}: {(await answer.aread()).decode()}")
                    async for line in answer.aiter_lines():
                        is_done = is_done or line == "data: [DONE]"
                        if "shutting down" in line:
                            break
                        assert '"error"' not in line, f"{model}: {line}"
                        if found := re.match(r'data: .*"text":("(?:[^"\\]|\\.)*")', line):
                            text += str(yaml.safe_load(found.group(1)))
            except httpx.HTTPError:
                is_done = False  # the gateway was killed
            if is_done:
                return text
            await asyncio.sleep(0.1)

    async def state(self, model: str) -> str:
        try:
            answer = await self._client.get(f"{self._stack.url}/v1/models")
            return next(str(one["state"]) for one in answer.json()["data"] if one["id"] == model)
        except httpx.HTTPError:
            return "unknown"

    async def until(self, model: str, *states: str) -> None:
        async with asyncio.timeout(120):
            while await self.state(model) not in states:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.02)

    async def sleep(self, model: str) -> None:
        """Puts a model to sleep; what dies meanwhile may make that fail."""
        try:
            await self._client.post(f"{self._stack.url}/v1/admin/models/{model}/sleep", json={})
        except httpx.HTTPError:
            pass

    async def wake(self, model: str) -> None:
        try:
            await self._client.post(f"{self._stack.url}/v1/admin/models/{model}/wake")
        except httpx.HTTPError:
            pass


@asynccontextmanager
async def client_of(stack: Stack) -> AsyncIterator[Client]:
    async with httpx.AsyncClient(timeout=180, verify=NO_CERTIFICATES) as client:
        yield Client(stack, client)


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with client_of(stack) as client:
        for name in NAMES:
            if name not in stack.texts:
                stack.texts[name] = await client.text(name)
        assert len(set(stack.texts.values())) == len(NAMES)
        yield client


Stage = Callable[[Stack, Client, str], Awaitable[None]]


async def while_it_loads(stack: Stack, client: Client, kind: str) -> None:
    asked = asyncio.create_task(client.text("c"))
    await client.until("c", "loading", "ready")
    await stack.kill(kind, "c")
    assert await asked == stack.texts["c"]


async def while_it_falls_asleep(stack: Stack, client: Client, kind: str) -> None:
    assert await client.text("a") == stack.texts["a"]
    sleeping = asyncio.create_task(client.sleep("a"))
    await stack.kill(kind, "a")
    await sleeping
    asked = asyncio.create_task(client.text("a"))
    await client.wake("a")
    assert await asked == stack.texts["a"]


async def while_it_wakes(stack: Stack, client: Client, kind: str) -> None:
    assert await client.text("a") == stack.texts["a"]
    await client.sleep("a")
    asked = asyncio.create_task(client.text("a"))
    waking = asyncio.create_task(client.wake("a"))
    await client.until("a", "loading", "ready")
    await stack.kill(kind, "a")
    await waking
    assert await asked == stack.texts["a"]


async def while_it_makes_room(stack: Stack, client: Client, kind: str) -> None:
    assert await client.text("b") == stack.texts["b"]
    assert await client.text("a") == stack.texts["a"]
    asked = asyncio.create_task(client.text("c"))  # for which b falls asleep
    again = asyncio.create_task(client.text("b"))
    await client.until("c", "loading", "ready")
    await stack.kill(kind, "b")
    assert await asked == stack.texts["c"]
    assert await again == stack.texts["b"]


STAGES = (while_it_loads, while_it_falls_asleep, while_it_wakes, while_it_makes_room)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
async def test_what_dies_is_replaced_and_no_request_is_lost(
    stack: Stack, client: Client, stage: Stage, kind: str
) -> None:
    neighbor = asyncio.create_task(client.text("a" if stage is while_it_loads else "c"))
    await stage(stack, client, kind)
    assert await neighbor in stack.texts.values()


@pytest.mark.parametrize("stage", ["loads", "serves"])
async def test_the_gateway_dies_while_a_model(stack: Stack, client: Client, stage: str) -> None:
    for name in ("a", "b"):
        assert await client.text(name) == stack.texts[name]
    asked = {name: asyncio.create_task(client.text(name)) for name in NAMES}
    await client.until("c", *(("loading",) if stage == "loads" else ("ready",)))
    await stack.kill("gateway")
    for name, text in asked.items():
        assert await text == stack.texts[name], name


async def test_a_model_that_cannot_be_loaded_fails_alone(stack: Stack, client: Client, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    async with httpx.AsyncClient(timeout=180, base_url=stack.url, verify=NO_CERTIFICATES) as http:
        put = await http.put("/v1/admin/models/broken", json={"model": str(tmp_path)})
        assert put.status_code in (201, 400), put.text
        if put.status_code == 201:
            neighbor = asyncio.create_task(client.text("a"))
            answer = await http.post("/v1/completions", json={"model": "broken", "prompt": "x", "max_tokens": 1})
            assert answer.status_code == 503 and str(tmp_path) in answer.text
            assert await neighbor == stack.texts["a"]
            assert (await http.delete("/v1/admin/models/broken")).status_code == 204
        models = (await http.get("/v1/models")).json()["data"]
        assert [one["id"] for one in models] == list(NAMES)

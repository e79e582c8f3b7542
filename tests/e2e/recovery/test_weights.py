"""Weights replaced under load, over real processes: no request is lost, and each has the tokens of one checkpoint."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.line import Line, http_client, running_line
from tests.services.executor.models.tiny import save_tiny
from tests.services.executor.service.test_replacement import save_other

PROMPTS = ["One", "A longer one that goes on"]
NUM_TOKENS = 60


@dataclass(frozen=True)
class Received:
    """A completion as a client received it."""

    version: str
    token_ids: tuple[int, ...]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two of one tiny model, and one that is cut off."""
    root = tmp_path_factory.mktemp("weights")
    sizes = {"vocab_size": 49152, "max_position_embeddings": 512, "num_hidden_layers": 2}
    save_tiny(root / "a", "Llama", **sizes)
    save_other(root / "a", root / "b")
    save_other(root / "a", root / "cut")
    file = root / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    return {name: root / name for name in ("a", "b", "cut")}


@pytest.fixture(scope="module")
def small_line(sockets: Path, checkpoints: dict[str, Path], smollm2_gguf: Path) -> object:
    executor = ["--dtype", "float32", "--num-gpu-blocks-override", "200", "--num-threads", "1"]
    tokenizer = ["--tokenizer", str(smollm2_gguf)]
    with running_line(sockets, str(checkpoints["a"]), executor=executor, tokenizer=tokenizer) as line:
        yield line


async def completion(client: openai.AsyncOpenAI, prompt: str, seed: int = 0) -> Received:
    """All of its events name the same weights."""
    stream = await client.completions.create(
        model="m",
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        seed=seed,
        temperature=0.7,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    versions, token_ids = set[str | None](), list[int]()
    async for event in stream:
        versions.add(event.system_fingerprint)
        token_ids += getattr(event.choices[0], "token_ids", None) or []
    (version,) = versions
    assert version is not None and len(token_ids) == NUM_TOKENS
    return Received(version, tuple(token_ids))


async def replace(line: Line, model: Path, version: str = "") -> httpx.Response:
    async with http_client(base_url=line.base_url, timeout=60) as client:
        body = {"model": str(model), "version": version or None}
        return await client.post("/v1/admin/weights", json=body)


@asynccontextmanager
async def load(line: Line) -> AsyncIterator[list[tuple[int, Received]]]:
    """Completions all the time; the list grows by (index of the prompt, what was received). An error is one of the
    test."""
    done: list[tuple[int, Received]] = []
    leave = asyncio.Event()

    async def one_after_the_other(index: int) -> None:
        async with line.openai() as client:
            while not leave.is_set():
                done.append((index, await completion(client, PROMPTS[index], seed=index)))

    tasks = [asyncio.create_task(one_after_the_other(index)) for index in range(len(PROMPTS))]
    try:
        yield done
    finally:
        leave.set()
        await asyncio.gather(*tasks)


async def undisturbed(line: Line) -> dict[int, Received]:
    async with line.openai() as client:
        received = [await completion(client, prompt, seed=index) for index, prompt in enumerate(PROMPTS)]
    return dict(enumerate(received))


async def until(count: int, done: list[tuple[int, Received]]) -> None:
    """Waits until `count` more are done."""
    end = len(done) + count
    async with asyncio.timeout(60):
        while True:
            if len(done) >= end:
                return
            await asyncio.sleep(0.01)


async def test_no_request_is_lost_and_each_has_the_tokens_of_one_checkpoint(
    small_line: Line, checkpoints: dict[str, Path]
) -> None:
    line, expected = small_line, {}
    for name in ("b", "a"):
        assert (await replace(line, checkpoints[name], name)).status_code == 200
        expected[name] = await undisturbed(line)
    assert all(expected["a"][index].token_ids != expected["b"][index].token_ids for index in range(len(PROMPTS)))
    async with load(line) as done:
        await until(3, done)
        for name in ("b", "a", "b"):
            answer = await replace(line, checkpoints[name], name)
            assert answer.status_code == 200 and answer.json()["version"] == name
            await until(3, done)
        refused = await replace(line, checkpoints["cut"])
        assert refused.status_code == 400 and "model.safetensors" in refused.text
        # It dies after a replacement, and during one.
        line.restart("executor")
        await until(3, done)
        replacing = asyncio.create_task(replace(line, checkpoints["a"], "a"))
        await asyncio.sleep(0.05)
        line.restart("executor")
        await replacing
        await until(3, done)
        replacing = asyncio.create_task(replace(line, checkpoints["b"], "b"))
        await asyncio.sleep(0.05)
        line.restart("scheduler")
        await replacing
        await until(3, done)
    for index, received in done:
        assert received == expected[received.version][index]
    assert {received.version for _, received in done} == {"a", "b"}
    assert len([*itertools.groupby(received.version for _, received in done)]) >= 4

"""Many adapters in turn over few slots, while each service is killed: each answer is that of its own adapter."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.line import Line, http_client, running_line
from tests.services.executor.helpers.adapters import save_adapter
from tests.services.executor.models.tiny import save_tiny

NUM_ADAPTERS, NUM_SLOTS, NUM_CLIENTS = 200, 4, 16
NUM_TOKENS = 8
NUM_ANSWERS = 80  # between two kills
NAMES = [f"a{number}" for number in range(NUM_ADAPTERS)]


@pytest.fixture(scope="module")
def line(sockets: Path, tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Line]:
    root = tmp_path_factory.mktemp("adapters")
    model, directory = root / "model", root / "directory"
    save_tiny(model, "Llama", vocab_size=49152, max_position_embeddings=512, num_hidden_layers=2)
    for number, name in enumerate(NAMES):
        save_adapter(directory / name, model, rank=2, seed=number, spread=1.0)
    executor = ["--dtype", "float32", "--num-gpu-blocks-override", "400", "--num-threads", "1", "--enable-lora"]
    executor += ["--max-loras", str(NUM_SLOTS), "--max-cpu-loras", "50", "--lora-dir", str(directory)]
    with running_line(sockets, str(model), executor=executor, tokenizer=["--tokenizer", str(smollm2_gguf)]) as line:
        yield line


@pytest.fixture
async def http(line: Line) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(base_url=line.base_url, timeout=120) as client:
        yield client


async def answer(client: httpx.AsyncClient, model: str) -> tuple[int, ...]:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": NUM_TOKENS, "temperature": 0}
    received = await client.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    assert received.status_code == 200, f"{model}: {received.text}"
    return tuple(received.json()["choices"][0]["token_ids"])


@pytest.mark.slow
async def test_each_answer_is_that_of_its_own_adapter(line: Line, http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):  # files that were just written count as complete a little later
        while len((await http.get("/v1/models")).json()["data"]) <= NUM_ADAPTERS:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    expected = {name: await answer(http, name) for name in NAMES}
    assert len(set(expected.values())) > NUM_ADAPTERS * 0.9, "adapters change the tokens"
    names, num_answers, wrong = itertools.cycle(NAMES), 0, list[str]()
    is_over = asyncio.Event()

    async def ask() -> None:
        nonlocal num_answers
        while not is_over.is_set():
            name = next(names)
            if await answer(http, name) != expected[name]:
                wrong.append(name)
            num_answers += 1

    async def kill() -> None:
        for service in ("executor", "scheduler", "tokenizer", "executor"):
            line.restart(service)
            await line.wait_ready()
            enough = num_answers + NUM_ANSWERS
            while num_answers < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        is_over.set()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(NUM_CLIENTS):
            tasks.create_task(ask())
        tasks.create_task(kill())
    assert not wrong
    listed = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
    assert listed == ["m", *sorted(NAMES)]

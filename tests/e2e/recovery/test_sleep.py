"""The model sleeps and wakes under load, over real processes that are killed: streams pause, and then go on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.line import Line, http_client, running_line

NUM_STREAMS, MAX_TOKENS = 3, 60


@pytest.fixture(scope="module")
def line(sockets: Path, quick_model: Path, smollm2_gguf: Path) -> Iterator[Line]:
    executor = ["--dtype", "float32", "--num-gpu-blocks-override", "400", "--num-threads", "1"]
    executor += ["--weights-cache", str(sockets / "weights")]
    tokenizer = ["--tokenizer", str(smollm2_gguf)]
    with running_line(sockets, str(quick_model), executor=executor, tokenizer=tokenizer) as line:
        yield line


async def call(line: Line, path: str) -> httpx.Response:
    async with http_client(base_url=line.base_url, timeout=60) as client:
        return await client.post(path)


async def is_sleeping(line: Line) -> bool:
    async with http_client(base_url=line.base_url, timeout=60) as client:
        return bool((await client.get("/is_sleeping")).json()["is_sleeping"])


async def until_asleep(line: Line) -> None:
    """Waits until the executor sleeps as the scheduler wants it to."""
    async with asyncio.timeout(30):
        while True:
            metrics = await line.metrics()
            asleep = [name for name in metrics if "executor_sleep_state" in name and "weights_offloaded" in name]
            if any(metrics[name] for name in asleep):
                return
            await asyncio.sleep(0.05)


class Streams:
    """Completions that are read as streams."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._begun = asyncio.Event()
        self.tasks = [asyncio.create_task(self._read(number)) for number in range(NUM_STREAMS)]

    async def begun(self) -> None:
        async with asyncio.timeout(30):
            await self._begun.wait()

    async def texts(self) -> list[str]:
        async with asyncio.timeout(90):
            return await asyncio.gather(*self.tasks)

    async def _read(self, number: int) -> str:
        text = ""
        async with self._line.openai() as client:
            async for chunk in await client.completions.create(
                model="m",
                prompt=f"Number {number}",
                max_tokens=MAX_TOKENS,
                temperature=0.8 if number % 2 else 0,
                seed=number,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                text += chunk.choices[0].text
                self._begun.set()
        return text


async def disturbed(line: Line, path: str, victim: str) -> None:
    """Makes a call, and kills a service once it has begun."""
    sleeps = path.startswith("/sleep")
    calling = asyncio.create_task(call(line, path))
    async with asyncio.timeout(30):
        while await is_sleeping(line) != sleeps:
            pass  # each look takes a moment
    line.restart(victim)
    answer = await calling
    assert answer.status_code == 200, answer.text


async def test_streams_are_whole_though_any_service_dies_while_the_model_falls_asleep_and_wakes(line: Line) -> None:
    undisturbed = await Streams(line).texts()
    for level, victim in ((1, "executor"), (2, "executor"), (1, "scheduler"), (2, "tokenizer")):
        with line.slow_steps(0.05):
            streams = Streams(line)
            await streams.begun()
            await disturbed(line, f"/sleep?level={level}&mode=keep", victim)
            assert await is_sleeping(line) and not any(task.done() for task in streams.tasks)
            await disturbed(line, "/wake_up", victim)
        assert await streams.texts() == undisturbed, (level, victim)
        assert not await is_sleeping(line)


async def test_a_process_that_dies_asleep_does_not_wake_the_model(line: Line) -> None:
    expected = await Streams(line).texts()
    assert (await call(line, "/v1/admin/models/m/sleep")).status_code == 200
    streams = Streams(line)  # they arrive while it sleeps
    for victim in ("executor", "scheduler", "tokenizer"):  # one after the other: scheduler and executor remember it
        line.restart(victim)
        await line.wait_ready("executor", "scheduler", "tokenizer", "gateway")
        await until_asleep(line)
    async with asyncio.timeout(30):
        while True:
            if (await line.load()).num_waiting == NUM_STREAMS:
                break
            await asyncio.sleep(0.05)
    async with http_client(base_url=line.base_url) as client:
        ready = await client.get("/readyz")
        assert ready.status_code == 200 and "sleeps" in ready.json()["reason"]
    assert (await call(line, "/v1/admin/models/m/wake")).status_code == 200
    assert await streams.texts() == expected

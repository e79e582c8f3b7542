"""A process that hangs counts as dead: nobody waits for it, health says so, and its requests go on."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import EXECUTOR_FLAGS, short_directory
from tests.e2e.line import Line, running_line

MAX_TOKENS = 48
HANG = ["--hang-timeout", "1"]


@pytest.fixture(scope="module")
def impatient(smollm2_gguf: Path) -> Iterator[Line]:
    flags = dict.fromkeys(("gateway", "tokenizer", "scheduler"), HANG)
    flags["executor"] = [*EXECUTOR_FLAGS, *HANG]
    with short_directory() as name, running_line(Path(name), str(smollm2_gguf), **flags) as line:
        yield line


async def complete(line: Line, number: int, begun: asyncio.Event) -> str:
    text = ""
    async with line.openai() as client:
        async for chunk in await client.completions.create(
            model="m",
            prompt=f"{number} little",
            max_tokens=MAX_TOKENS,
            temperature=0.8,
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            text += chunk.choices[0].text
            begun.set()
    return text


def start(line: Line) -> tuple[list[asyncio.Task[str]], list[asyncio.Event]]:
    begun = [asyncio.Event() for _ in range(4)]
    return [asyncio.create_task(complete(line, i, event)) for i, event in enumerate(begun)], begun


async def is_ready(line: Line) -> bool:
    async with httpx.AsyncClient() as client:
        try:
            return (await client.get(f"{line.base_url}/readyz", timeout=5)).status_code == 200
        except httpx.HTTPError:
            return False


async def until_ready(line: Line, ready: bool) -> None:
    async with asyncio.timeout(60):
        while await is_ready(line) != ready:  # noqa: ASYNC110 - the state of a service
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(impatient: Line) -> list[str]:
    async def run() -> list[str]:
        return await asyncio.gather(*start(impatient)[0])

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("victim", "ending"),
    [("executor", "continued"), ("executor", "replaced"), ("scheduler", "replaced"), ("tokenizer", "replaced")],
)
async def test_streams_survive_a_service_that_is_stopped(
    impatient: Line, undisturbed: list[str], victim: str, ending: str
) -> None:
    line = impatient
    tasks, begun = start(line)
    await asyncio.gather(*(event.wait() for event in begun))
    os.kill(line.pid(victim), signal.SIGSTOP)
    assert not all(task.done() for task in tasks), "nothing was left to hang"
    await until_ready(line, ready=False)
    if ending == "replaced":
        line.restart(victim)
    else:
        os.kill(line.pid(victim), signal.SIGCONT)
    assert await asyncio.gather(*tasks) == undisturbed
    await line.wait_ready()


async def test_a_service_that_hangs_while_idle_is_noticed(impatient: Line) -> None:
    os.kill(impatient.pid("executor"), signal.SIGSTOP)
    await until_ready(impatient, ready=False)
    os.kill(impatient.pid("executor"), signal.SIGCONT)
    await impatient.wait_ready()
    assert await complete(impatient, 1, asyncio.Event())


async def test_a_line_that_is_stopped_as_a_whole_goes_on(impatient: Line, undisturbed: list[str]) -> None:
    line = impatient
    pids = [line.pid(service) for service in line.processes]
    tasks, begun = start(line)
    await asyncio.gather(*(event.wait() for event in begun))
    lost = line.log("scheduler").count("lost the executor")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert await asyncio.gather(*tasks) == undisturbed
    assert all(process.poll() is None for process in line.processes.values())
    assert line.log("scheduler").count("lost the executor") == lost

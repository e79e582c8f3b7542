"""A process that hangs counts as dead: nothing waits for it, health reports it, and its requests go on."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.line import Line, http_client

MAX_TOKENS = 200  # a second
HANG = ["--hang-timeout", "1"]
SERVICES = ("executor", "scheduler", "tokenizer", "gateway")


@pytest.fixture(scope="module")
def line(quick_line: Line) -> Iterator[Line]:
    """The quick line; its services count as hung after a second."""
    before = {service: quick_line.flags.get(service, []) for service in SERVICES}
    for service in SERVICES:
        quick_line.restart(service, *before[service], *HANG)
    asyncio.run(quick_line.wait_ready())
    with quick_line.slow_steps():
        yield quick_line
    for service in SERVICES:
        quick_line.flags[service] = before[service]
        quick_line.restart(service)
    asyncio.run(quick_line.wait_ready())


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
    begun = [asyncio.Event() for _ in range(2)]
    return [asyncio.create_task(complete(line, i, event)) for i, event in enumerate(begun)], begun


async def is_ready(line: Line) -> bool:
    async with http_client() as client:
        try:
            return (await client.get(f"{line.base_url}/readyz", timeout=5)).status_code == 200
        except httpx.HTTPError:
            return False


async def until_ready(line: Line, ready: bool) -> None:
    async with asyncio.timeout(60):
        while await is_ready(line) != ready:  # noqa: ASYNC110 - the state of a service
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(line: Line) -> list[str]:
    async def run() -> list[str]:
        return await asyncio.gather(*start(line)[0])

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("victim", "ending"),
    [("executor", "continued"), ("executor", "replaced"), ("scheduler", "replaced"), ("tokenizer", "replaced")],
)
async def test_streams_survive_a_service_that_is_stopped(
    line: Line, undisturbed: list[str], victim: str, ending: str
) -> None:
    tasks, begun = start(line)
    await asyncio.gather(*(event.wait() for event in begun))
    pid = line.pid(victim)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not all(task.done() for task in tasks), "nothing was left to hang"
        await until_ready(line, ready=False)
        if ending == "replaced":
            line.restart(victim)
    finally:
        if ending == "continued" or line.pid(victim) == pid:
            os.kill(pid, signal.SIGCONT)
    assert await asyncio.gather(*tasks) == undisturbed
    await line.wait_ready()


async def test_a_service_that_hangs_while_idle_is_noticed(line: Line) -> None:
    os.kill(line.pid("executor"), signal.SIGSTOP)
    await until_ready(line, ready=False)
    os.kill(line.pid("executor"), signal.SIGCONT)
    await line.wait_ready()
    assert await complete(line, 1, asyncio.Event())


async def test_a_line_that_is_stopped_as_a_whole_goes_on(line: Line, undisturbed: list[str]) -> None:
    pids = [line.pid(service) for service in SERVICES]
    tasks, begun = start(line)
    await asyncio.gather(*(event.wait() for event in begun))
    lost = line.log("scheduler").count("lost the executor")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(2)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert await asyncio.gather(*tasks) == undisturbed
    assert all(process.poll() is None for process in map(line.processes.get, SERVICES))
    assert line.log("scheduler").count("lost the executor") == lost

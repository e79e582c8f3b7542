"""Many clients, rude ones among them, leave nothing behind."""

import asyncio
import random
import signal

import httpx

from tests.e2e.line import Line, http_client
from tests.sweep import IS_FULL

NUM_CLIENTS = 200 if IS_FULL else 60


async def client(http: httpx.AsyncClient, line: Line, number: int, rng: random.Random) -> bool:
    """One stream; a third leave at random, without a word. True if it was read to its end."""
    leave_after = rng.randrange(1, 12) if number % 3 == 0 else None
    body = {
        "model": "m",
        "prompt": f"Client {number} asks: " + "why? " * rng.randrange(1, 30),
        "max_tokens": rng.randrange(4, 24),
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    async with http.stream("POST", f"{line.base_url}/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = 0
        async for data in response.aiter_lines():
            if data == "data: [DONE]":
                return True
            lines += bool(data)
            if leave_after is not None and lines >= leave_after:
                return False
    return False


async def test_many_clients_a_third_of_them_rude(quick_line: Line) -> None:
    line = quick_line
    services = ("gateway", "tokenizer", "scheduler", "executor")

    async def burst() -> list[bool]:
        rng = random.Random(0)
        async with http_client(timeout=200, limits=httpx.Limits(max_connections=None)) as http:
            return await asyncio.gather(*(client(http, line, n, rng) for n in range(NUM_CLIENTS)))

    async def tasks_and_files() -> dict[str, tuple[float, int]]:
        await asyncio.sleep(1.0)
        metrics = await line.metrics()
        return {s: (metrics[f'pagewire:asyncio_tasks{{service="{s}"}}'], line.open_files(s)) for s in services}

    # The first burst fills what is made once and kept (thread pools, buffers); the second must add nothing.
    await burst()
    await line.wait_idle()
    before = await tasks_and_files()
    ended = await burst()
    assert all(ended[n] for n in range(NUM_CLIENTS) if n % 3)
    assert (await line.metrics())['pagewire:request_success_total{finished_reason="abort",service="scheduler"}']
    load = await line.wait_idle()
    assert (load.num_running, load.num_waiting, load.num_free_blocks) == (0, 0, load.num_blocks)
    after = await tasks_and_files()
    for service in services:
        assert after[service][0] <= before[service][0] + 2, (service, before, after)
        assert after[service][1] <= before[service][1] + 4, (service, before, after)


async def test_sigterm_lets_streams_end(quick_line: Line) -> None:
    line = quick_line
    async with http_client(timeout=120) as http:
        body = {"model": "m", "prompt": "Count:", "max_tokens": 300, "ignore_eos": True, "stream": True}

        async def one() -> str:
            async with http.stream("POST", f"{line.base_url}/v1/completions", json=body) as response:
                return [data async for data in response.aiter_lines() if data][-1]

        with line.slow_steps():
            tasks = [asyncio.create_task(one()) for _ in range(8)]
            async with asyncio.timeout(60):
                while (await line.load()).num_running < 8:  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.02)
            gateway = line.processes["gateway"]
            gateway.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*tasks) == ["data: [DONE]"] * 8
    assert await asyncio.to_thread(gateway.wait, 30) == 0
    line.start("gateway")
    await line.wait_ready()

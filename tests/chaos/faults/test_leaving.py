"""A client that leaves gives its pages back within the step that runs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.fuzz.line import FuzzLine, running_line

# Nothing that runs now comes to its end.
FOR_EVER_S = 3600.0
LONG = {"max_tokens": 400, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a stream": ("/v1/completions", {"prompt": "p", "stream": True, **LONG}),
    "a whole answer": ("/v1/completions", {"prompt": "p", **LONG}),
    "three outputs": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "p"}], "n": 3, **LONG}),
    "two prompts": ("/v1/completions", {"prompt": ["p", "q"], "stream": True, **LONG}),
    "a conversation": ("/v1/responses", {"input": "p", "stream": True, "max_output_tokens": 400}),
    "another API's": (
        "/v1/messages",
        {"model": "m", "messages": [{"role": "user", "content": "p"}], "max_tokens": 400, "stream": True},
    ),
    "a search": ("/v1/completions", {"prompt": "p", "use_beam_search": True, "n": 2, **LONG}),
}


@pytest.fixture
async def line(tmp_path: Path, smollm2_gguf: Path) -> AsyncIterator[FuzzLine]:
    async with running_line(tmp_path, smollm2_gguf) as line:
        yield line
        line.scheduler.executor.step_seconds = 0.0


async def until_running(line: FuzzLine) -> None:
    async with asyncio.timeout(20):
        while not (await line.scheduler.load()).num_running:  # noqa: ASYNC110 - another service's state
            await asyncio.sleep(0.005)


async def test_pages_are_free_before_the_step_ends(line: FuzzLine) -> None:
    for path, body in REQUESTS.values():
        executor = line.scheduler.executor
        executor.step_seconds = 0.005
        request = asyncio.create_task(line.http.post(path, json=body))
        await until_running(line)
        executor.step_seconds = FOR_EVER_S
        await asyncio.sleep(0.05)  # the step that has begun ends, the next one does not
        request.cancel()
        await asyncio.wait([request])
        await line.scheduler.wait_until_free()
        await line.scheduler.kill_executor()
        executor.step_seconds = 0.0
        await line.scheduler.start_executor()

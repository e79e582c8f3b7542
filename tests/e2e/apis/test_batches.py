"""A batch outlives every service, and `pagewire batch` needs none to be there."""

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.line import REPOSITORY, Line
from tests.e2e.prompts import PROMPTS

NUM_REQUESTS = 24
ENDPOINT = "/v1/completions"


def requests() -> bytes:
    lines = []
    for number in range(NUM_REQUESTS):
        body = {"model": "m", "prompt": PROMPTS[number % 16], "max_tokens": 12, "temperature": 0}
        lines.append({"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body | {"ignore_eos": True}})
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def started(ai: openai.AsyncOpenAI) -> str:
    file = await ai.files.create(file=("in.jsonl", requests()), purpose="batch")
    batch = await ai.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="1h")
    return batch.id


def answered(line: Line) -> list[bytes]:
    """Lines that a batch at work has written."""
    names = (line.directory / "data" / "batches").glob("file-*")
    return [row for name in names for row in name.read_bytes().splitlines(keepends=True) if row.endswith(b"\n")]


async def wait_answered(line: Line, count: int) -> list[bytes]:
    async with asyncio.timeout(60):
        while len(found := answered(line)) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


async def ended(ai: openai.AsyncOpenAI, id: str) -> dict[str, str]:
    """The texts by custom id of a batch without errors."""
    async with asyncio.timeout(120):
        while True:
            try:
                if (batch := await ai.batches.retrieve(id)).status == "completed":
                    break
            except openai.APIConnectionError:  # the gateway starts
                pass
            await asyncio.sleep(0.1)
    assert (batch.request_counts.completed, batch.error_file_id) == (NUM_REQUESTS, None)
    lines = [json.loads(row) for row in (await ai.files.content(batch.output_file_id)).content.splitlines()]
    assert Counter(one["custom_id"] for one in lines) == Counter(str(number) for number in range(NUM_REQUESTS))
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in lines}


@pytest.fixture(scope="module")
def few_at_once(line: Line) -> Iterator[Line]:
    line.restart("gateway", "--batch-concurrency", "6")
    asyncio.run(line.wait_ready())
    yield line
    del line.flags["gateway"]
    line.restart("gateway")
    asyncio.run(line.wait_ready())


@pytest.mark.slow
async def test_survives_the_death_of_every_service(few_at_once: Line) -> None:
    line = few_at_once
    async with line.openai() as ai:
        undisturbed = await ended(ai, await started(ai))
        id = await started(ai)
        await wait_answered(line, 4)
        for victim in ("tokenizer", "scheduler", "executor"):
            line.restart(victim)
        before = await wait_answered(line, 12)
        assert len(before) < NUM_REQUESTS, "nothing was left to lose"
        line.restart("gateway")
        texts = await ended(ai, id)
        batch = await ai.batches.retrieve(id)
        after = (await ai.files.content(batch.output_file_id)).content.splitlines(keepends=True)
    assert after[: len(before)] == before, "what had an answer kept it"
    assert texts == undisturbed
    await line.wait_ready()


def test_the_command_starts_what_it_needs(quick_model: Path, smollm2_gguf: Path, tmp_path: Path) -> None:
    question: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 4, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "model": "m", "max_tokens": 4}
    lines = [
        {"custom_id": "text", "method": "POST", "url": ENDPOINT, "body": question},
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    flags = ["--model", str(quick_model), "--tokenizer", str(smollm2_gguf), "--served-model-name", "m"]
    command = [sys.executable, "-m", "pagewire.cli", "run-batch", *files, *flags]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "2 of 2 requests are done" in ended.stderr
    answers = {one["custom_id"]: one["response"] for one in map(json.loads, (tmp_path / "out.jsonl").open())}
    assert answers["text"]["body"]["usage"]["completion_tokens"] == 4
    assert answers["chat"]["status_code"] == 200

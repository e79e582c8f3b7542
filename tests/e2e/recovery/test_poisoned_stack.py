"""Suspect requests that end processes, in a stack that replaces them, as clients see it."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import APIError, AsyncOpenAI

from tests.e2e.line import REPOSITORY, free_port, http_client
from tests.e2e.stack.test_serve import is_ready

# Token ids that no text of these has.
FAULTS = {"device": 48001, "hang": 48002, "exit": 48003}
REASONS = {
    "device": "(INTERNAL: fatal device error: RuntimeError: injected: the device is broken)",
    "hang": "(DEADLINE_EXCEEDED: no progress: the device has hung for more than 2 s",
    "exit": "(its process failed)",
}
PROMPTS = ["The sea is", "Once upon a time there was", "In the year 1815", "A recipe for bread:"]


@dataclass
class Stack:
    port: int
    log: Path

    @property
    def num_deaths(self) -> int:
        return self.log.read_text().count("executor ended")

    async def complete(self, prompt: str | list[int]) -> str:
        text = ""
        async with AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            max_retries=0,
            timeout=120,
            http_client=http_client(),
        ) as client:
            async for chunk in await client.completions.create(
                model="m", prompt=prompt, max_tokens=40, temperature=0, stream=True, extra_body={"ignore_eos": True}
            ):
                text += chunk.choices[0].text
        return text


@pytest.fixture(scope="module")
def stack(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    found = Stack(free_port(), tmp_path_factory.mktemp("stack") / "serve.log")
    command = [sys.executable, "-m", "pagewire.cli", "serve", str(smollm2_gguf), "--served-model-name", "m"]
    command += ["--port", str(found.port), "--grpc-port", str(free_port()), "--dtype", "float32"]
    command += ["--kv-cache-memory-bytes", "256MiB", "--max-model-len", "1024", "--hang-timeout", "2"]
    command += ["--fault-injection", ",".join(f"{token_id}:{kind}" for kind, token_id in FAULTS.items())]
    with found.log.open("wb") as out:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while not is_ready(found.port):
            assert process.poll() is None and time.monotonic() < deadline, found.log.read_text()
            time.sleep(0.1)
        yield found
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAULTS)
async def test_two_processes_die_and_the_neighbors_have_their_texts(stack: Stack, kind: str) -> None:
    undisturbed = await asyncio.gather(*map(stack.complete, PROMPTS))
    before = stack.num_deaths
    neighbors = [asyncio.create_task(stack.complete(prompt)) for prompt in PROMPTS]
    await asyncio.sleep(0.1)
    with pytest.raises(APIError) as raised:
        await stack.complete([1, 2, FAULTS[kind], 5])
    assert "the executor failed 2 times while it ran this request" in str(raised.value)
    assert REASONS[kind] in str(raised.value)
    assert await asyncio.gather(*neighbors) == undisturbed
    assert stack.num_deaths == before + 2

"""REST bodies that are almost right, to a whole stack with the built-in model: what reaches kernels and grammars."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from benchmarks import serving
from pagewire.config import ServeConfig
from pagewire.flags.ports import available_port
from tests.chaos.fuzz.http import fuzz_body
from tests.chaos.fuzz.line import Finding
from tests.chaos.fuzz.mutation import Mutator
from tests.chaos.fuzz.watch import processes

# A client that waits no longer leaves: without max_tokens an answer may be long.
PATIENCE_S = 5.0
_NUM_CLIENTS = 4
_NUM_BETWEEN_CHECKS = 100  # cases
_IDLE_TIMEOUT_S = 60.0
_VALID = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class Stack:
    """Addresses of a running stack. grpc: by the service that listens there."""

    url: str
    grpc: dict[str, str]


@contextmanager
def running_stack() -> Iterator[Stack]:
    """Starts a stack of which every public port listens."""
    ports = {service: available_port("127.0.0.1") for service in ("tokenizer", "scheduler")}
    config = ServeConfig(
        log_level="error",
        max_model_len=1024,
        trust_request_chat_template=True,
        scheduler_grpc_port=ports["scheduler"],
    )
    with serving.server(config, ports["tokenizer"]) as (_, port):
        yield Stack(f"http://127.0.0.1:{port}", {service: f"127.0.0.1:{at}" for service, at in ports.items()})


async def fuzz(url: str, seeds: Sequence[int]) -> None:
    """All of the cases. Raises Finding."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        before, answer = await processes(http), await _answer(http)
        for start in range(0, len(seeds), _NUM_BETWEEN_CHECKS):
            part = seeds[start : start + _NUM_BETWEEN_CHECKS]
            await asyncio.gather(*(_client(http, part[number::_NUM_CLIENTS]) for number in range(_NUM_CLIENTS)))
            await _check(http, before, answer, f"after the seeds {part[0]} to {part[-1]}")


async def _client(http: httpx.AsyncClient, seeds: Sequence[int]) -> None:
    for seed in seeds:
        try:
            async with asyncio.timeout(PATIENCE_S):
                await fuzz_body(http, Mutator(seed))
        except TimeoutError:
            pass
        except Finding as error:
            raise Finding(f"seed {seed}: {error}") from error


async def _check(http: httpx.AsyncClient, before: dict[str, int], answer: str, when: str) -> None:
    """The same processes, the same answer, and no page is held."""
    deadline = time.monotonic() + _IDLE_TIMEOUT_S
    while held := await _num_held(http):
        if time.monotonic() > deadline:
            raise Finding(f"{when}: {held} pages are held")
        await asyncio.sleep(0.2)
    if (now := await processes(http)) != before:
        raise Finding(f"{when}: of {before} a process has died: {now}")
    if (said := await _answer(http)) != answer:
        raise Finding(f"{when}: {said!r} for {answer!r}")


async def _num_held(http: httpx.AsyncClient) -> int:
    replicas = (await http.get("/v1/status")).json()["replicas"]
    return sum(group["used"] for replica in replicas for group in replica["groups"])


async def _answer(http: httpx.AsyncClient) -> str:
    answer = await http.post("/v1/completions", json=_VALID)
    if answer.status_code != 200:
        raise Finding(f"a valid request: {answer.status_code} {answer.text}")
    text: str = answer.json()["choices"][0]["text"]
    return text

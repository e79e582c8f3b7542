"""Every service is stopped and replaced, one after the other, while clients stream: none of them sees an error."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import short_directory
from tests.e2e.line import Line, http_client
from tests.e2e.replicated_line import SERVICES, ReplicatedLine, running

NUM_STREAMS = 4
MAX_TOKENS = 40
PATIENCE_S = 60.0  # of a successor, for what it runs when it is stopped


class Clients:
    """Each repeats its own request, at a gateway that was ready a moment ago, through connections that are used again.

    `texts` is what each received, `longest_pause` in seconds between two events of a stream since it was last reset.
    """

    def __init__(self, line: Line, http: httpx.AsyncClient) -> None:
        self._urls = self._ready = [line.base_url, line.sister_url]
        self._http = http
        self._turn = 0
        self.texts: list[set[str]] = [set() for _ in range(NUM_STREAMS)]
        self.num_ended = 0
        self.longest_pause = 0.0

    async def balance(self) -> None:
        while True:
            probes = [self._http.get(f"{url}/readyz") for url in self._urls]
            answers = await asyncio.gather(*probes, return_exceptions=True)
            ready = [
                url
                for url, answer in zip(self._urls, answers, strict=True)
                if isinstance(answer, httpx.Response) and answer.status_code == 200
            ]
            # A balancer that finds no server ready sends requests nevertheless: the line recovers.
            self._ready = ready or self._urls
            await asyncio.sleep(0.1)  # a fraction of --drain-delay

    def _url(self) -> str:
        self._turn += 1
        return self._ready[self._turn % len(self._ready)]

    async def stream(self, number: int) -> str:
        body = {"prompt": f"{number} little", "max_tokens": MAX_TOKENS, "seed": number, "ignore_eos": True}
        text, last_seen = "", time.monotonic()
        async with self._http.stream("POST", f"{self._url()}/v1/completions", json=body | {"stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for event in response.aiter_lines():
                self.longest_pause, last_seen = max(self.longest_pause, time.monotonic() - last_seen), time.monotonic()
                if event == "data: [DONE]":
                    return text
                if event:
                    text += json.loads(event.removeprefix("data: "))["choices"][0]["text"]
        raise AssertionError(f"the stream ended after {text!r}")

    async def repeat(self, number: int) -> None:
        while True:
            self.texts[number].add(await self.stream(number))
            self.num_ended += 1

    async def go_on(self) -> None:
        """Returns when as many streams as there are clients have ended."""
        ended = self.num_ended
        while self.num_ended < ended + NUM_STREAMS:  # noqa: ASYNC110 - by others' progress
            await asyncio.sleep(0.02)

    async def ask(self) -> None:
        """Sends requests that need no executor."""
        while True:
            url = self._url()
            for answer in (
                await self._http.post(f"{url}/tokenize", json={"prompt": "The sea"}),
                await self._http.get(f"{url}/v1/models"),
            ):
                assert answer.status_code == 200, answer.text
            await asyncio.sleep(0.3)


@asynccontextmanager
async def clients_of(line: Line) -> AsyncIterator[Clients]:
    """Clients at work. Raises the error that one of them received."""
    async with http_client(timeout=60) as http:
        clients = Clients(line, http)
        async with asyncio.TaskGroup() as group:
            works = [clients.balance(), clients.ask(), *(clients.repeat(number) for number in range(NUM_STREAMS))]
            tasks = [group.create_task(work) for work in works]
            yield clients
            for task in tasks:
                task.cancel()


@dataclass
class Replaced:
    """A line after all of its services were replaced."""

    line: ReplicatedLine
    undisturbed: list[set[str]]
    reported: list[set[str]]  # while they were


@pytest.fixture(scope="module")
def replaced(smollm2_gguf: Path) -> Iterator[Replaced]:
    """Replaces all services. Gateways first let their streams end and the others hand them on half way; their
    successors have time."""
    timeouts = {"gateway": 30.0, "tokenizer": 0.2, "scheduler": 0.2, "executor": 0.2}
    with short_directory() as name, running(Path(name), str(smollm2_gguf), step_seconds=0.03, **timeouts) as line:
        yield asyncio.run(replace_all(line))


async def replace_all(line: ReplicatedLine) -> Replaced:
    await line.wait_ready(*SERVICES)
    await line.wait_executors(2)
    async with http_client(timeout=60) as http:
        undisturbed = [{await Clients(line, http).stream(number)} for number in range(NUM_STREAMS)]
    async with clients_of(line) as clients:
        await clients.go_on()
        for service in SERVICES:
            clients.longest_pause = 0.0
            process = line.processes[service]
            process.terminate()
            assert await asyncio.to_thread(process.wait, 60) == 0, line.log(service)
            line.timeouts[service] = PATIENCE_S
            line.start(service)
            await line.wait_ready(service)
            await line.wait_executors(2)
            await clients.go_on()
            print(f"{service}: a pause of {clients.longest_pause:.2f} s")
    return Replaced(line, undisturbed, clients.texts)


def test_no_client_sees_that_every_service_is_replaced(replaced: Replaced) -> None:
    assert replaced.reported == replaced.undisturbed


async def test_streams_end_though_all_services_are_stopped(replaced: Replaced) -> None:
    """Stops a service as the shutdown of a machine does."""
    line = replaced.line
    await line.wait_idle()  # those before have been given up
    async with http_client(timeout=60) as http:
        clients = Clients(line, http)
        streams = [asyncio.create_task(clients.stream(number)) for number in range(NUM_STREAMS)]
        async with asyncio.timeout(60):
            while (await line.load()).num_running < NUM_STREAMS:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)
        for process in line.processes.values():
            process.terminate()
        assert [{text} for text in await asyncio.gather(*streams)] == replaced.undisturbed
    for service, process in line.processes.items():
        assert await asyncio.to_thread(process.wait, 60) == 0, line.log(service)

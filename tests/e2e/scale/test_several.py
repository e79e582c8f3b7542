"""Two tokenizers, two schedulers and an executor of each behind one gateway, any of which may die."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from pagewire.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.addresses import without_directories
from tests.e2e.conftest import short_directory
from tests.e2e.line import http_client
from tests.e2e.several_line import SERVICES, SeveralLine, running

NUM_STREAMS = 8
MORTALS = ("tokenizer", "tokenizer2", "scheduler", "scheduler2", "executor", "executor2")


@pytest.fixture(scope="module")
def several(smollm2_gguf: Path) -> Iterator[SeveralLine]:
    with short_directory() as name, running(Path(name), str(smollm2_gguf), step_seconds=0.02) as line:
        yield line


@asynccontextmanager
async def ready(line: SeveralLine) -> AsyncIterator[httpx.AsyncClient]:
    """All services are, and the gateway's REST client."""
    await line.wait_ready(*SERVICES)
    async with http_client(base_url=line.base_url, timeout=60) as http:
        yield http


async def complete(http: httpx.AsyncClient, prompt: str, max_tokens: int = 40, **more: object) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "seed": 1, "ignore_eos": True, **more}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str([choice["text"] for choice in answer.json()["choices"]])


async def chat(http: httpx.AsyncClient, *turns: str) -> str:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
    answer = await http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 8, "seed": 1})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def running_at(line: SeveralLine, scheduler: str) -> int:
    async with rpc.channel(line.address(scheduler)) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        return (await stub.GetLoad(scheduler_pb2.GetLoadRequest(), timeout=10)).num_running


async def until_running(line: SeveralLine, count: int) -> tuple[int, int]:
    """Waits until that many requests run; returns how many run at each scheduler."""
    async with asyncio.timeout(20):
        while True:
            loads = await running_at(line, "scheduler"), await running_at(line, "scheduler2")
            if sum(loads) >= count:
                return loads
            await asyncio.sleep(0.02)


async def test_texts_are_the_same_whichever_process_dies(several: SeveralLine) -> None:
    """Deaths come from a seed; each is followed by a successor while the next one may die."""
    prompts = [f"{number} little" for number in range(NUM_STREAMS)]
    async with ready(several) as http:
        undisturbed = await asyncio.gather(*(complete(http, prompt) for prompt in prompts))
        reported: list[list[str]] = [[] for _ in prompts]
        stops = asyncio.Event()

        async def repeat(number: int) -> None:
            while not stops.is_set():
                reported[number].append(await complete(http, prompts[number]))

        async with asyncio.TaskGroup() as clients:
            for number in range(NUM_STREAMS):
                clients.create_task(repeat(number))
            chance = random.Random(20)
            for service in chance.sample(MORTALS, len(MORTALS)):
                await until_running(several, NUM_STREAMS // 2)
                several.kill(service)
                await asyncio.sleep(0.3)
                several.start(service)
                await several.wait_ready(service)
            stops.set()
        assert [set(texts) for texts in reported] == [{text} for text in undisturbed]
        assert min(map(len, reported)) >= 2


async def test_streams_go_on_when_a_tokenizer_or_a_scheduler_dies(several: SeveralLine) -> None:
    async with ready(several) as http:
        for service in ("tokenizer", "scheduler2"):
            longest, last_seen, ended = 0.0, dict.fromkeys(range(4), time.monotonic()), set()
            body = {"prompt": "The sea", "max_tokens": 100, "seed": 1, "ignore_eos": True, "stream": True, "n": 4}
            async with http.stream("POST", "/v1/completions", json=body) as response:
                num_events = 0
                async for line in response.aiter_lines():
                    if not line or line == "data: [DONE]":
                        continue
                    num_events += 1
                    if num_events == 80:
                        several.kill(service)
                    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                    index, now = choice["index"], time.monotonic()
                    longest, last_seen[index] = max(longest, now - last_seen[index]), now
                    if choice["finish_reason"] is not None:
                        assert choice["finish_reason"] == "length"
                        ended.add(index)
            assert ended == set(range(4)) and num_events > 80
            print(f"{service}: a pause of {longest:.2f} s")
            several.start(service)
            await several.wait_ready(service)


async def test_all_that_clients_and_operators_ask_for(several: SeveralLine) -> None:
    async with ready(several) as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in models] == ["m", "found"], "the model, and what lies in --lora-dir"
        assert (await http.post("/tokenize", json={"prompt": "The sea"})).json()["count"]
        best = await http.post(
            "/v1/completions", json={"prompt": "The", "max_tokens": 4, "n": 2, "use_beam_search": True}
        )
        assert best.status_code == 200 and len(best.json()["choices"]) == 2, best.text
        status = (await http.get("/v1/status")).json()
        assert status["ready"] and status["num_gateways"] == 1 and len(status["replicas"]) == 2
        found = sorted((one["service"], one["address"]) for one in status["services"] if one["service"] != "gateway")
        assert found == sorted((name.removesuffix("2"), without_directories(several.address(name))) for name in MORTALS)
        metrics = await several.metrics()
        for name in ("scheduler", "scheduler2"):
            label = f'{{address="{without_directories(several.address(name))}",service="scheduler"}}'
            assert f"pagewire:num_requests_running{label}" in metrics


async def test_turns_of_a_conversation_are_at_one_scheduler_and_conversations_at_both(several: SeveralLine) -> None:
    async with ready(several) as http:
        queried, before = set(), await hits(http)
        for number in range(8):
            first = f"Conversation {number}: " + "tell me of the sea. " * 10
            answer = await chat(http, first)
            await chat(http, first, answer, "And of ships?")
            after = await hits(http)
            found = {address for address, value in after.items() if value > before[address]}
            assert len(found) == 1, "the second turn has found the first"
            queried |= found
            before = after
        assert len(queried) == 2


async def hits(http: httpx.AsyncClient) -> dict[str, float]:
    """Tokens found in the prefix cache, by scheduler."""
    found = {}
    for line in (await http.get("/metrics")).text.splitlines():
        if line.startswith("pagewire:prefix_cache_hits_total{"):
            labels, _, value = line.rpartition(" ")
            found[labels] = float(value)
    return found


async def test_an_abort_reaches_the_service_that_has_the_request(several: SeveralLine) -> None:
    async with ready(several) as http:
        asked = [asyncio.create_task(complete(http, f"{n} ships", 3000, request_id=f"a{n}")) for n in range(6)]
        await until_running(several, 6)
        assert (await http.get("/load")).json()["server_load"] == 6
        answer = await http.post("/abort_requests", json={"abort_all": True})
        assert answer.json()["aborted"] == 6
        await asyncio.gather(*asked)


async def test_one_of_each_is_enough_to_be_ready(several: SeveralLine) -> None:
    async with ready(several) as http:
        for service in ("tokenizer2", "scheduler", "executor"):
            several.kill(service)
        assert await complete(http, "0 little")
        assert (await http.get("/readyz")).status_code == 200
        # The other scheduler's executor dies, too: none is left.
        several.kill("executor2")
        await until_ready(http, False)
        for service in ("tokenizer2", "scheduler", "executor", "executor2"):
            several.start(service)
        await until_ready(http, True)


async def until_ready(http: httpx.AsyncClient, is_ready: bool) -> None:
    async with asyncio.timeout(20):
        while ((await http.get("/readyz")).status_code == 200) != is_ready:  # noqa: ASYNC110 - others' state
            await asyncio.sleep(0.05)


async def test_one_that_drains_gets_nothing_new(several: SeveralLine) -> None:
    async with ready(several) as http:
        for service, clients in (("scheduler2", ("tokenizer", "tokenizer2")), ("tokenizer", ("gateway",))):
            undisturbed = await complete(http, "The sea")
            asked = [asyncio.create_task(complete(http, "The sea")) for _ in range(NUM_STREAMS)]
            await until_running(several, NUM_STREAMS)
            reported = {client: several.log(client).count(" drains; new requests") for client in clients}
            several.processes[service].terminate()
            async with asyncio.timeout(10):
                while any(several.log(one).count(" drains; new requests") == count for one, count in reported.items()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            at_others = [asyncio.create_task(complete(http, "The sea", 600)) for _ in range(NUM_STREAMS)]
            assert set(await asyncio.gather(*asked)) == {undisturbed}
            # It had nothing to hand on: it ends before those, and before its time is up.
            assert await asyncio.to_thread(several.processes[service].wait, 20) == 0
            assert not any(task.done() for task in at_others)
            assert "cut off, or continue elsewhere" not in several.log(service)
            for task in at_others:
                task.cancel()
            several.start(service)
            await several.wait_ready(service)


async def test_a_batch_and_grammars_go_on_whichever_process_dies(several: SeveralLine) -> None:
    grammar = {"structured_outputs": {"regex": "[a-z ]+"}}
    async with ready(several) as http:
        bodies = [
            {"model": "m", "prompt": f"{n} ships", "max_tokens": 30, "seed": 1, **(grammar if n % 2 else {})}
            for n in range(24)
        ]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        undisturbed = [answer.json()["choices"][0]["text"] for answer in answers]
        lines = [
            json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body})
            for n, body in enumerate(bodies)
        ]
        file = {"file": ("in.jsonl", "\n".join(lines).encode())}
        uploaded = (await http.post("/v1/files", files=file, data={"purpose": "batch"})).json()
        asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=asked)).json()
        await until_running(several, NUM_STREAMS)
        for service in ("tokenizer2", "scheduler"):
            several.kill(service)
        async with asyncio.timeout(30):
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0.05)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": 24, "completed": 24, "failed": 0}
        content = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
        rows = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, content.splitlines())}
        assert [rows[str(n)]["choices"][0]["text"] for n in range(24)] == undisturbed
        for service in ("tokenizer2", "scheduler"):
            several.start(service)
        await several.wait_ready("tokenizer2", "scheduler")

"""Operators' routes over a real tokenizer service: requests ended by their ids, load, what is served."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewire.client import Client
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.gateway.operation.unserved import UNSERVED
from pagewire.services.tokenizer.generation.text_generator import TextGenerator
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.v1 import common_pb2, inference_pb2
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.core.test_keys import new
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine

TEXT = "one two three four five six"
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}]}


@pytest.fixture(scope="module")
def pool(smollm2_gguf: Path):
    pool = TokenizerPool(FileSource(str(smollm2_gguf)), size=1)
    yield pool
    pool.close()


@pytest.fixture
async def line(
    tmp_path: Path, smollm2_gguf: Path, smollm2: LoadedTokenizer, pool: TokenizerPool
) -> AsyncIterator[TokenizerLine]:
    """Says two tokens at each step that a test asks for."""
    tokens = [*smollm2.encode(TEXT, add_special_tokens=False), EOS]
    scheduler = FakeScheduler(lambda request: tokens, auto=False, tokens_per_step=2)
    line = TokenizerLine(tmp_path, scheduler, smollm2_gguf, served_model_name="m")
    async with line.running(pool=pool):
        yield line


@pytest.fixture
async def gateways(line: TokenizerLine) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Two processes' worth."""
    async with running_gateway(line.config.listen) as one, running_gateway(line.config.listen) as other:
        await wait_ready(one)
        await wait_ready(other)
        yield one, other


async def aborted(client: httpx.AsyncClient, path: str = "/abort_requests", **body: Any) -> int:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["status"] == "aborted"
    return int(answer.json()["aborted"])


async def test_a_stream_ends_with_what_it_has(line: TokenizerLine, gateways) -> None:
    """An abort by the client's id works through another gateway; other requests continue."""
    one, other = gateways
    scheduler = line.scheduler
    streams = [
        asyncio.create_task(one.post(CHAT, json=BODY | {"stream": True, "n": 2, "request_id": name}))
        for name in ("mine", "yours")
    ]
    await scheduler.until(lambda: scheduler.num_running == 4)
    assert (await other.get("/load")).json() == {"server_load": 4}
    scheduler.step()
    assert await aborted(other, request_ids=["chatcmpl-mine", "missing", "min"]) == 2
    mine = await streams[0]
    await scheduler.until(lambda: len(scheduler.aborted) == 2)
    chunks = [json.loads(data) for data in mine.text.split("data: ")[1:] if not data.startswith("[DONE]")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["abort"] * 2
    said = "".join(choice["delta"].get("content", "") for choice in choices if choice["index"] == 0)
    assert said and TEXT.startswith(said)
    assert mine.text.endswith("data: [DONE]\n\n")
    assert await aborted(other, request_ids=["mine"]) == 0
    scheduler.auto = True
    scheduler.step()
    assert "abort" not in (await streams[1]).text
    assert (await other.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_request", {"rid": "mine"}),
        ("/abort_request", {"rid": "", "abort_all": True}),
        ("/inference/v1/abort_requests", {"request_ids": ["mine"]}),
    ],
)
async def test_a_whole_answer_says_that_it_was_aborted(line: TokenizerLine, gateways, path: str, body: dict) -> None:
    one, other = gateways
    answer = asyncio.create_task(one.post(CHAT, json=BODY, headers={"x-request-id": "mine"}))
    await line.scheduler.until(lambda: line.scheduler.num_running == 1)
    assert await aborted(other, path, **body) == 1
    choice = (await answer).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("abort", "")


async def test_a_tenant_ends_its_own_and_an_operator_all(line: TokenizerLine, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    alice, bob, operator = new(path, "alice"), new(path, "bob"), new(path, "operator", admin=True)
    async with running_gateway(line.config.listen, api_key_file=str(path)) as client:
        await wait_ready(client)

        async def ask(headers: dict[str, str], name: str) -> str:
            answer = await client.post(CHAT, json=BODY, headers={**headers, "x-request-id": name})
            return str(answer.json()["choices"][0]["finish_reason"])

        asked = [asyncio.create_task(ask(headers, name)) for headers in (alice, bob) for name in ("a", "b")]
        await line.scheduler.until(lambda: line.scheduler.num_running == 4)

        async def end(headers: dict[str, str], **body: Any) -> int:
            answer = await client.post("/abort_requests", json=body, headers=headers)
            return int(answer.json()["aborted"])

        assert await end(bob, request_ids=["a", "chatcmpl-a"]) == 1
        assert await asked[2] == "abort" and not asked[0].done()
        assert await end(bob, abort_all=True) == 1
        assert await end(alice, request_ids=["b"]) == 1
        assert await end(operator, abort_all=True) == 1
        assert [await one for one in asked] == ["abort"] * 4


async def test_which_requests_has_to_be_said(gateways) -> None:
    for body in ({}, {"request_ids": []}, {"abort_all": False}, {"rid": ""}, {"request_ids": [""]}):
        assert (await gateways[0].post("/abort_requests", json=body)).status_code == 400


async def test_over_grpc(line: TokenizerLine) -> None:
    async with Client(line.config.listen) as client:

        async def responses() -> list[inference_pb2.GenerateResponse]:
            return [response async for response in client.generate("x", request_id="mine")]

        generation = asyncio.create_task(responses())
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        nameless = line.stub.Generate(inference_pb2.GenerateRequest(text="x"))
        await line.scheduler.until(lambda: line.scheduler.num_running == 2)
        assert await client.abort("", "chatcmpl-") == 0
        assert await client.abort("mine") == 1
        nameless.cancel()
        assert (await generation)[-1].finish_reason == common_pb2.FINISH_REASON_ABORT
        assert await client.abort("mine") == 0
    await line.scheduler.until(lambda: line.scheduler.num_running == 0)


async def test_a_prompt_that_is_not_encoded_yet(line: TokenizerLine, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = asyncio.Event()

    async def encode(*arguments: object) -> None:
        encoding.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(TextGenerator, "_encode", encode)
    async with Client(line.config.listen) as client:

        async def responses() -> list[inference_pb2.GenerateResponse]:
            return [response async for response in client.generate("x", request_id="mine")]

        generation = asyncio.create_task(responses())
        await encoding.wait()
        assert await client.abort("mine") == 1
        [only] = await generation
    assert (only.text, only.finish_reason) == ("", common_pb2.FINISH_REASON_ABORT)
    assert not line.scheduler.requests


async def test_what_is_served(line: TokenizerLine, gateways) -> None:
    client = gateways[0]
    line.scheduler.auto = True
    assert (await client.get("/health_generate")).json() == {"status": "ok"}
    assert len(line.scheduler.requests) == 1
    for method, path in (("GET", "/ping"), ("POST", "/ping"), ("GET", "/ready")):
        assert (await client.request(method, path)).json() == {"status": "ok"}
    info = (await client.get("/model_info")).json()
    assert (info["is_generation"], info["served_model_name"], info["model_path"]) == (
        True,
        "m",
        Path(line.config.model).stem,
    )
    assert (await client.get("/get_model_info")).json() == info
    server = (await client.get("/server_info")).json()
    assert (server["served_model_names"], server["num_requests"]) == (["m"], 0)


@pytest.mark.parametrize("enabled", [True, False])
async def test_the_tokenizer_is_reported_on_request(tmp_path: Path, smollm2_gguf: Path, enabled: bool) -> None:
    scheduler = FakeScheduler(lambda request: [EOS])
    line = TokenizerLine(tmp_path, scheduler, smollm2_gguf, enable_tokenizer_info_endpoint=enabled)
    async with line.running(), running_gateway(line.config.listen) as client:
        await wait_ready(client)
        answer = await client.get("/tokenizer_info")
    if enabled:
        info = answer.json()
        assert "<|im_start|>" in info["chat_template"] and "tool_chat_template" not in info
        assert (info["vocab_size"], info["special_tokens"]["eos_token"]) == (49152, "<|im_end|>")
    else:
        assert answer.status_code == 400
        assert "--enable-tokenizer-info-endpoint" in answer.json()["error"]["message"]


async def test_routes_that_are_not_served_say_so(gateways, document) -> None:
    client = gateways[0]
    for method, path in (
        ("POST", "/v1/audio/transcriptions"),
        ("GET", "/is_paused"),
        ("POST", "/load_lora_adapter_from_tensors"),
    ):
        answer = await client.request(method, path)
        error = answer.json()["error"]
        assert answer.headers["x-should-retry"] == "false"
        assert (answer.status_code, error["code"]) == (501, "unsupported_route")
        assert error["message"].startswith(f"{path} is not supported by Pagewire: ")
    assert (await client.post("/v1/nothing")).status_code == 404
    assert not UNSERVED.keys() & document["paths"].keys()

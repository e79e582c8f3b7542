"""Open responses when clients disconnect or stall, and when the tokenizer service dies."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from prometheus_client import REGISTRY

from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import NUM_CACHED_TOKENS, FakeTokenizer, expected_text, generated_text

TEXT = "/v1/completions"


def events_of(text: str) -> list[dict]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def text_of(response: httpx.Response) -> str:
    """The text of a streamed completion that has to have ended well."""
    assert response.status_code == 200, response.text
    assert response.text.endswith("data: [DONE]\n\n")
    events = events_of(response.text)
    assert not any("error" in event for event in events)
    return "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("tokens_per_step", [1, 5])
async def test_streamed_and_whole_say_the_same(
    client: httpx.AsyncClient, fake: FakeTokenizer, tokens_per_step: int
) -> None:
    """Text, tokens and counts, whether they came in columns or in messages of their own."""
    fake.tokens_per_step = tokens_per_step
    body = {"prompt": "p", "seed": 1, "n": 3, "max_tokens": 20, "return_token_ids": True}
    streamed = await client.post(
        TEXT, json=body | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    whole = (await client.post(TEXT, json=body)).json()
    events = events_of(streamed.text)
    for index in range(3):
        choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == expected_text("p", 1 + index, 20)
        assert whole["choices"][index]["text"] == expected_text("p", 1 + index, 20)
        token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
        assert token_ids == whole["choices"][index]["token_ids"] == [ord(c) for c in expected_text("p", 1 + index, 20)]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 60 == whole["usage"]["completion_tokens"]
    assert events[-1]["usage"] == whole["usage"]


# Clients that leave.


async def test_leaving_a_stream_aborts_upstream(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = {"prompt": "p", "stream": True, "max_tokens": 900, "n": 2}
    async with client.stream("POST", TEXT, json=body, headers={"x-request-id": "mine"}) as response:
        async for _ in response.aiter_lines():
            break
    await eventually(lambda: sorted(fake.aborted) == ["mine-0", "mine-1"])
    assert not fake.live


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_any_token_aborts_upstream(
    client: httpx.AsyncClient, fake: FakeTokenizer, stream: bool
) -> None:
    fake.running.clear()
    post = asyncio.create_task(
        client.post(TEXT, json={"prompt": "p", "stream": stream}, headers={"x-request-id": "mine"})
    )
    await eventually(lambda: fake.live)
    post.cancel()
    await eventually(lambda: fake.aborted == ["mine"])


async def test_leaving_within_the_body(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    """Counted as a client that has gone, not as an error of the server."""
    before = REGISTRY.get_sample_value("pagewire:gateway_clients_gone_total") or 0
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
    writer.write(b"Content-Length: 100\r\n\r\n{")
    await writer.drain()
    await eventually(lambda: REGISTRY.get_sample_value("pagewire:http_requests_in_flight") == 1)
    writer.close()
    await eventually(lambda: REGISTRY.get_sample_value("pagewire:gateway_clients_gone_total") == before + 1)
    assert "unexpected error" not in caplog.text


async def test_many_clients_of_whom_a_third_leave(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    rng = random.Random(0)
    await client.post(TEXT, json={"prompt": "warm"})
    tasks_before = len(asyncio.all_tasks())

    async def one(i: int) -> None:
        body = {"prompt": f"prompt {i}", "seed": i, "stream": True, "max_tokens": 30}
        leave_after = rng.randrange(1, 20) if i % 3 == 0 else None
        async with client.stream("POST", TEXT, json=body) as response:
            lines = []
            async for line in response.aiter_lines():
                lines.append(line)
                if len(lines) == leave_after:
                    return
        events = events_of("\n\n".join(lines))
        text = "".join(choice["text"] for event in events for choice in event["choices"])
        assert text == expected_text(f"prompt {i}", i, 30)

    await asyncio.gather(*(one(i) for i in range(48)))
    await eventually(lambda: not fake.live)
    # A connection that is kept alive has no task.
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks_before)


@asynccontextmanager
async def lazy_client(fake: FakeTokenizer, client: httpx.AsyncClient) -> AsyncIterator[socket.socket]:
    """A socket that asked for an endless stream and has read nothing of it."""
    fake.max_model_len = 10**9
    fake.generate = lambda prompt, seed, n: "x" * n if n > 1000 else generated_text(prompt, seed, n)
    fake.tokens_per_step = 20_000
    await wait_ready(client)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (client.base_url.host, client.base_url.port))
        body = json.dumps({"prompt": "p", "stream": True, "max_tokens": 10**7})
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nX-Request-Id: lazy\r\nContent-Type: application/json\r\n"
        await loop.sock_sendall(sock, f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        yield sock


async def test_client_that_does_not_read_is_aborted_and_delays_no_others(fake: FakeTokenizer, address: str) -> None:
    loop = asyncio.get_running_loop()
    async with running_gateway(address, send_buffer=16 * 1024) as client, lazy_client(fake, client) as sock:
        await eventually(lambda: fake.aborted == ["lazy"])
        prompt = {"prompt": "q", "seed": 1, "stream": True}
        assert text_of(await client.post(TEXT, json=prompt)) == expected_text("q", 1, 16)
        # Should it read after all, it learns why its text is not whole.
        received = b""
        async with asyncio.timeout(10):
            while not received.endswith(b"0\r\n\r\n"):
                received += await loop.sock_recv(sock, 1 << 20)
        assert b"does not read" in received
        assert b"[DONE]" in received


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel has no such timeout")
async def test_client_that_never_reads_is_cut_off(
    fake: FakeTokenizer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.main.UNREAD_TIMEOUT_S", 0.3)
    async with running_gateway(address, send_buffer=16 * 1024) as client, lazy_client(fake, client):
        await eventually(lambda: fake.aborted == ["lazy"])
        await eventually(lambda: REGISTRY.get_sample_value("pagewire:http_requests_in_flight") == 0)


# The tokenizer service goes away.


async def many_streams(client: httpx.AsyncClient, n: int) -> list[httpx.Response]:
    bodies = [{"prompt": f"prompt {i}", "seed": i, "stream": True, "max_tokens": 60} for i in range(n)]
    bodies = [body | {"stream_options": {"include_usage": True}} for body in bodies]
    return await asyncio.gather(*(client.post(TEXT, json=body) for body in bodies))


def check_undisturbed(responses: list[httpx.Response]) -> None:
    for i, response in enumerate(responses):
        assert text_of(response) == expected_text(f"prompt {i}", i, 60)
        usage = events_of(response.text)[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(f"prompt {i}"), 60)
        assert usage["prompt_tokens_details"] == {"cached_tokens": NUM_CACHED_TOKENS}


@pytest.mark.parametrize("break_at", [1, 6, 31])
async def test_streams_go_on_after_the_link_broke(
    client: httpx.AsyncClient, fake: FakeTokenizer, break_at: int
) -> None:
    before = REGISTRY.get_sample_value("pagewire:gateway_resubmitted_requests_total") or 0
    fake.break_at = break_at
    check_undisturbed(await many_streams(client, 16))
    assert fake.break_at is None
    resumed = [request for request in fake.submissions if request.resume_token_ids]
    assert resumed
    assert all(request.resubmitted for request in resumed)
    resubmitted = [request for request in fake.submissions if request.resubmitted]
    counted = REGISTRY.get_sample_value("pagewire:gateway_resubmitted_requests_total") - before
    assert counted == len(resubmitted) >= len(resumed)


async def test_streams_go_on_after_the_service_restarted(
    client: httpx.AsyncClient, fake: FakeTokenizer, address: str
) -> None:
    fake.step_s = 0.01
    streams = asyncio.create_task(many_streams(client, 16))
    for num_tokens in (5, 20):
        await eventually(lambda n=num_tokens: any(live.num_done >= n for live in fake.live.values()))
        await fake.stop()
        await fake.start(address)
    check_undisturbed(await streams)


async def test_whole_answer_after_the_link_broke(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.break_at = 7
    answer = (await client.post(TEXT, json={"prompt": "p", "seed": 3, "n": 2, "logprobs": 0})).json()
    assert [choice["text"] for choice in answer["choices"]] == [expected_text("p", seed, 16) for seed in (3, 4)]
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 16
    assert answer["usage"]["completion_tokens"] == 32
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": NUM_CACHED_TOKENS}


async def test_break_before_the_first_token(client: httpx.AsyncClient, fake: FakeTokenizer, address: str) -> None:
    fake.running.clear()
    post = asyncio.create_task(client.post(TEXT, json={"prompt": "p", "stream": True}))
    await eventually(lambda: fake.live)
    await fake.stop()
    fake.running.set()
    await fake.start(address)
    text = text_of(await post)
    first, second = fake.submissions
    assert (first.resubmitted, second.resubmitted) == (False, True)
    assert first.request == second.request
    # The seed that the gateway drew is the same both times.
    assert text == expected_text("p", first.request.sampling_params.seed, 16)


async def test_aborted_while_the_link_was_down_stays_aborted(
    client: httpx.AsyncClient, fake: FakeTokenizer, address: str
) -> None:
    fake.running.clear()
    gone = asyncio.create_task(client.post(TEXT, json={"prompt": "gone"}))
    stays = asyncio.create_task(client.post(TEXT, json={"prompt": "stays"}))
    await eventually(lambda: len(fake.live) == 2)
    await fake.stop()
    gone.cancel()
    await asyncio.sleep(0.05)
    fake.received.clear()
    fake.running.set()
    await fake.start(address)
    assert (await stays).status_code == 200
    assert [request.text for request in fake.received] == ["stays"]


async def test_new_requests_wait_for_a_tokenizer_that_is_away(
    client: httpx.AsyncClient, fake: FakeTokenizer, address: str
) -> None:
    assert (await client.post(TEXT, json={"prompt": "before"})).status_code == 200
    await fake.stop()
    while (await client.get("/readyz")).status_code == 200:
        pass  # the gateway has not noticed: what it sends now might have been let in
    meanwhile = [
        asyncio.create_task(client.post(TEXT, json={"prompt": "meanwhile", "seed": 5})),
        asyncio.create_task(client.post("/tokenize", json={"prompt": "ab"})),
        asyncio.create_task(client.post("/detokenize", json={"tokens": [97]})),
        asyncio.create_task(client.get("/v1/models")),
    ]
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in meanwhile)
    num_before = len(fake.submissions)
    await fake.start(address)
    responses = await asyncio.gather(*meanwhile)
    assert [response.status_code for response in responses] == [200] * 4
    text, tokenized, detokenized, models = (response.json() for response in responses)
    assert text["choices"][0]["text"] == expected_text("meanwhile", 5, 16)
    assert (tokenized["tokens"], detokenized["prompt"], models["data"][0]["id"]) == ([94, 97, 98], "a", "fake")
    # None of them was let in before.
    assert [submission.resubmitted for submission in fake.submissions[num_before:]] == [False]


async def test_calls_wait_for_a_tokenizer_no_longer_than_a_moment(
    client: httpx.AsyncClient, fake: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.core.tokenizer_client.AWAY_TIMEOUT_S", 0.2)
    await fake.stop()
    response = await client.get("/v1/models")
    assert response.status_code == 503
    assert "cannot be reached" in response.json()["error"]["message"]


async def test_recovery_has_a_bound(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, recovery_timeout=0.3) as client:
        await wait_ready(client)
        fake.step_s = 0.05
        whole = asyncio.create_task(client.post(TEXT, json={"prompt": "p", "max_tokens": 500}))
        streamed = asyncio.create_task(client.post(TEXT, json={"prompt": "p", "max_tokens": 500, "stream": True}))
        await eventually(lambda: len(fake.live) == 2 and all(live.num_done for live in fake.live.values()))
        await fake.stop()
        response = await whole
        assert response.status_code == 503
        assert response.headers["retry-after"]
        last = events_of((await streamed).text)[-1]
        assert last["error"]["type"] == "service_unavailable_error"
        assert (await client.post(TEXT, json={"prompt": "p"})).status_code == 503
        # It is not the end of the gateway.
        fake.step_s = 0.002
        await fake.start(address)
        await wait_ready(client)
        assert (await client.post(TEXT, json={"prompt": "p"})).status_code == 200


# The gateway shuts down.


async def test_shutdown_cuts_what_takes_too_long(fake: FakeTokenizer, address: str) -> None:
    leave = asyncio.Event()
    async with running_gateway(address, leave, shutdown_timeout=0.1) as client:
        await wait_ready(client)
        stream = asyncio.create_task(client.post(TEXT, json={"prompt": "p", "stream": True, "max_tokens": 900}))
        await eventually(lambda: any(live.num_done for live in fake.live.values()))
        fake.running.clear()
        leave.set()
        text = (await stream).text
        assert "shutting down" in events_of(text)[-1]["error"]["message"]
        assert text.endswith("data: [DONE]\n\n")

"""The bodies of requests in flight are bounded together."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pagewire.gateway.core import body_room
from pagewire.gateway.core.body_room import SMALL_BYTES, BodyPlace, BodyRoom
from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

LIMIT = 4 * SMALL_BYTES


def body(num_bytes: int) -> dict[str, Any]:
    """A valid request of this many bytes, with a short prompt."""
    return {"prompt": "p", "metadata": {"note": "x" * 500}, "user": "u" * num_bytes}


@pytest.fixture
async def small(fake: FakeTokenizer, address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    """A gateway with room for bodies of 3 * SMALL_BYTES of one client."""
    monkeypatch.setattr(body_room, "_PART", 0.0)
    monkeypatch.setattr(body_room, "_LEAST_BYTES", LIMIT)
    async with running_gateway(address) as client:
        await wait_ready(client)
        yield client


async def chunks(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 1000):
        yield content[start : start + 1000]


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_what_has_no_room_is_refused_until_there_is_some(
    fake: FakeTokenizer, small: httpx.AsyncClient, is_chunked: bool
) -> None:
    headers = {"content-type": "application/json"}

    async def post(num_bytes: int) -> httpx.Response:
        content = encode(body(num_bytes))
        sent = chunks(content) if is_chunked else content
        return await small.post("/v1/completions", content=sent, headers=headers)

    fake.running.clear()
    first = asyncio.create_task(post(3 * SMALL_BYTES - 1000))
    await eventually(lambda: fake.live)
    refused = await post(3 * SMALL_BYTES - 1000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bodies_too_large")
    assert refused.headers["retry-after"] == "1"
    others = [asyncio.create_task(post(1000)) for _ in range(5)]
    await eventually(lambda: len(fake.live) == 6)
    fake.running.set()
    answers = await asyncio.gather(first, *others)
    assert {answer.status_code for answer in answers} == {200}
    assert (await post(3 * SMALL_BYTES - 1000)).status_code == 200


def test_a_client_has_three_quarters_of_the_room() -> None:
    room = BodyRoom(LIMIT)
    own, next_one, other = BodyPlace(room, "a"), BodyPlace(room, "a"), BodyPlace(room, "b")
    for size in range(1000, 3 * SMALL_BYTES, 1000):
        own.grow(size)
    own.grow(3 * SMALL_BYTES)
    own.grow(10)  # of its announced size, as it arrives
    with pytest.raises(ApiError, match=f"of your requests in flight have {3 * SMALL_BYTES} of at most"):
        own.grow(3 * SMALL_BYTES + 1)
    with pytest.raises(ApiError, match=f"of all requests in flight have {3 * SMALL_BYTES} of at most {LIMIT} bytes"):
        other.grow(SMALL_BYTES + 1)
    next_one.grow(SMALL_BYTES)
    next_one.close()
    own.close()
    other.grow(3 * SMALL_BYTES)
    other.close()
    with pytest.raises(ApiError, match="of your requests in flight have 0"):
        own.grow(LIMIT)

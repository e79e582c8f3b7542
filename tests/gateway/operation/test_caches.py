"""The routes that reset the prefix cache."""

from typing import Any

import grpc
import httpx
import pytest

from pagewire.wire.rpc import RpcError
from tests.gateway.core.test_openapi import check
from tests.gateway.fake_tokenizer import FakeTokenizer

RESET, FLUSH = "/reset_prefix_cache", "/flush_cache"


@pytest.mark.parametrize("query", ["", "?reset_running_requests=false&reset_external=true"])
async def test_vllms_clients_reset_the_cache(
    client: httpx.AsyncClient, fake: FakeTokenizer, document: dict[str, Any], query: str
) -> None:
    answer = await client.post(RESET + query)
    assert answer.json() == {"success": True, "blocks": 7, "executors": 2}
    check(document, RESET, "post", 200, "application/json", answer.json())
    assert fake.num_resets == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_sglangs_clients_do_the_same(client: httpx.AsyncClient, fake: FakeTokenizer, method: str) -> None:
    answer = await client.request(method, FLUSH, params={"timeout": "3.5"})
    assert (answer.status_code, answer.text) == (200, "Cache flushed.\nBlocks forgotten: 7, executors: 2.\n")
    assert fake.num_resets == 1


@pytest.mark.parametrize(
    ("url", "named"),
    [
        (f"{RESET}?reset_running_requests=true", "'reset_running_requests' is not supported"),
        (f"{RESET}?reset_running=1", "reset_running"),
        (f"{RESET}?reset_external=maybe", "reset_external"),
        (f"{FLUSH}?timeout=-1", "timeout"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(
    client: httpx.AsyncClient, fake: FakeTokenizer, url: str, named: str
) -> None:
    refused = await client.post(url)
    assert refused.status_code == 400 and named in refused.json()["error"]["message"]
    assert not fake.num_resets


@pytest.mark.parametrize("content", [b'{"timeout": 3}', b"[]", b"timeout=3", b"\xff", b"{" * 100_000])
async def test_a_body_is_refused(client: httpx.AsyncClient, fake: FakeTokenizer, content: bytes) -> None:
    for route in (RESET, FLUSH):
        refused = await client.post(route, content=content, headers={"content-type": "application/json"})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(f"{route} takes no body; leave it out")
        assert (await client.get(FLUSH)).status_code == 200 == (await client.post(route, content=b" {} ")).status_code
    assert fake.num_resets == 4


async def test_a_page_of_another_site_cannot_flush_it_with_an_image(
    client: httpx.AsyncClient, fake: FakeTokenizer
) -> None:
    for site in ("cross-site", "same-site"):
        assert (await client.get(FLUSH, headers={"sec-fetch-site": site})).status_code == 403
    assert (await client.get(FLUSH, headers={"sec-fetch-site": "none"})).status_code == 200
    assert fake.num_resets == 1


async def test_a_failure_says_why(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.reset_problem = RpcError(grpc.StatusCode.UNAVAILABLE, "no scheduler is available; try again later")
    for route in (RESET, FLUSH):
        answer = await client.post(route)
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, fake.reset_problem.message)

"""The seeds of REST requests on a server with `--seed`."""

from typing import Any

import pytest

from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


async def seeds_of(
    fake: FakeTokenizer, address: str, *calls: tuple[str, dict[str, Any]], seed: int | None
) -> list[int]:
    fake.received.clear()
    async with running_gateway(address, seed=seed) as client:
        await wait_ready(client)
        for path, body in calls:
            response = await client.post(path, json=body)
            assert response.status_code == 200, response.text
    return [request.sampling_params.seed for request in fake.received]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "p"}),
        ("/v1/chat/completions", CHAT),
        ("/v1/messages", CHAT | {"max_tokens": 8}),
        ("/v1/responses", {"input": "Hi"}),
        ("/generate", {"text": "p"}),
    ],
)
async def test_the_same_request_has_the_same_seed(
    fake: FakeTokenizer, address: str, path: str, body: dict[str, Any]
) -> None:
    """The order of requests, a restart and the form of the answer do not count."""
    other = ("/v1/completions", {"prompt": "other"})
    first = await seeds_of(fake, address, (path, body), other, seed=42)
    again = await seeds_of(fake, address, other, (path, body | {"stream": True}), seed=42)
    assert first == again[::-1] and first[0] != first[1]
    assert await seeds_of(fake, address, (path, body), seed=43) != first[:1]
    assert await seeds_of(fake, address, (path, body), seed=None) != await seeds_of(
        fake, address, (path, body), seed=None
    )


async def test_a_seed_of_the_client_counts_and_choices_differ(fake: FakeTokenizer, address: str) -> None:
    calls = [("/v1/completions", {"prompt": "p", "n": 2}), ("/v1/completions", {"prompt": "p", "seed": 7})]
    one, two, given = await seeds_of(fake, address, *calls, seed=42)
    assert (two - one, given) == (1, 7)

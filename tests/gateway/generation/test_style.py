"""The parts of answers that the operator's flags set."""

import json
from typing import Any

import httpx
import pytest

from pagewire.config import GatewayConfig
from pagewire.errors import StartupError
from pagewire.gateway.generation.style import AnswerStyle
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
]


async def chunks(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = (await client.post(path, json=body | {"stream": True})).text
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_forced_usage_is_in_every_chunk(fake: FakeTokenizer, address: str, path: str, body: Any) -> None:
    async with running_gateway(address, enable_force_include_usage=True) as client:
        await wait_ready(client)
        found = await chunks(client, path, body)
        assert all(one["usage"]["prompt_tokens"] for one in found)
        assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"fingerprint_mode": "custom", "fingerprint_value": "fp_mine"}, "fp_mine"),
        ({"fingerprint_mode": "none"}, None),
        ({"fingerprint_mode": "hash"}, "v7"),
    ],
)
async def test_the_fingerprint_is_that_of_the_flags(
    fake: FakeTokenizer, address: str, path: str, body: Any, flags: dict[str, Any], expected: str | None
) -> None:
    fake.weights_version = "v7"
    async with running_gateway(address, **flags) as client:
        await wait_ready(client)
        answer = await client.post(path, json=body)
        assert answer.json()["system_fingerprint"] == expected
        assert answer.headers["x-weights-version"] == "v7"
        assert {one["system_fingerprint"] for one in await chunks(client, path, body)} == {expected}


@pytest.mark.parametrize("flags", [{"fingerprint_mode": "custom"}, {"fingerprint_value": "fp_mine"}])
def test_a_fingerprint_needs_both_flags(flags: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="belong together"):
        AnswerStyle.of(GatewayConfig(**flags))

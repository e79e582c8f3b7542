"""The parts of answers that the operator's flags set."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from pagewire.config import GatewayConfig
from pagewire.config.values.gateway import check_fingerprint
from pagewire.errors import StartupError
from pagewire.gateway.generation.timing import metrics_of
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.v1.admin_pb2 import RequestAccount, RequestPhase
from pagewire.v1.common_pb2 import Usage
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.services.tokenizer.service_line import TokenizerLine

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


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_metrics_are_the_times_of_one_output(
    line: TokenizerLine, pool: TokenizerPool, path: str, body: Any
) -> None:
    account = RequestAccount(
        service="scheduler",
        first_token_seconds=0.5,
        phases=[
            RequestPhase(name="queue", seconds=0.1),
            RequestPhase(name="prefill", seconds=0.4),
            RequestPhase(name="decode", seconds=1.5),
        ],
        usage=Usage(completion_tokens=4),
    )
    expected = {
        "time_to_first_token_ms": 400.0,
        "generation_time_ms": 1500.0,
        "queue_time_ms": 100.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 4 / 1.9,
    }
    assert msgspec.to_builtins(metrics_of(account)) == pytest.approx(expected)
    async with line.running(pool=pool), running_gateway(line.config.listen, enable_per_request_metrics=True) as client:
        await wait_ready(client)
        whole = (await client.post(path, json=body)).json()
        assert whole["metrics"].keys() == expected.keys()
        [*others, last] = await chunks(client, path, body | {"stream_options": {"include_usage": True}})
        assert last["metrics"].keys() == expected.keys() and all("metrics" not in one for one in others)
        assert (await client.post(path, json=body | {"n": 2})).json()["metrics"] is None


@pytest.mark.parametrize("flags", [{"fingerprint_mode": "custom"}, {"fingerprint_value": "fp_mine"}])
def test_a_fingerprint_needs_both_flags(flags: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="belong together"):
        check_fingerprint(GatewayConfig(**flags))

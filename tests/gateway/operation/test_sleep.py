"""The routes that put the model to sleep and wake it."""

from typing import Any

import grpc
import httpx
import pytest

from pagewire.v1.admin_pb2 import SleepMode
from pagewire.wire.rpc import RpcError
from tests.gateway.core.test_openapi import check
from tests.gateway.fake_tokenizer import FakeTokenizer

MODEL = "tiny"
SLEEP, WAKE = f"/v1/admin/models/{MODEL}/sleep", f"/v1/admin/models/{MODEL}/wake"


@pytest.fixture(autouse=True)
def _served(fake: FakeTokenizer) -> None:
    fake.models = [MODEL, "org/other"]


async def test_a_model_sleeps_and_wakes(
    client: httpx.AsyncClient, fake: FakeTokenizer, document: dict[str, Any]
) -> None:
    asleep = await client.post(SLEEP, json={"level": 2, "mode": "keep"})
    state = {"object": "model.state", "model": MODEL, "state": "asleep", "level": 2, "executors": 2}
    assert asleep.json() == state
    check(document, "/v1/admin/models/{name}/sleep", "post", 200, "application/json", asleep.json())
    assert fake.sleeps[0].mode == SleepMode.SLEEP_MODE_KEEP
    assert [one["state"] for one in (await client.get("/v1/models")).json()["data"]] == ["asleep"] * 2
    ready = await client.get("/readyz")
    assert ready.status_code == 200 and "the model sleeps" in ready.json()["reason"]
    assert (await client.post(WAKE)).json() == state | {"state": "ready", "level": 0}
    assert (await client.get("/readyz")).json() == {"status": "ok"}
    assert (await client.post("/v1/admin/models/org/other/sleep")).json()["level"] == 1
    assert fake.sleeps[1].mode == SleepMode.SLEEP_MODE_WAIT


async def test_vllms_clients_do_the_same(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for query, level, mode in (
        ("", 1, SleepMode.SLEEP_MODE_WAIT),
        ("?level=2&mode=abort", 2, SleepMode.SLEEP_MODE_ABORT),
    ):
        asleep = await client.post(f"/sleep{query}")
        assert (asleep.status_code, asleep.content) == (200, b"")
        assert (fake.sleeps[-1].level, fake.sleeps[-1].mode) == (level, mode)
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await client.post("/wake_up")).status_code == 200
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("url", "body", "named"),
    [
        ("/sleep?level=0", None, "level"),
        ("/sleep?level=3", None, "level"),
        ("/sleep?mode=never", None, "mode"),
        ("/sleep?tags=weights", None, "'tags' is not supported"),
        ("/wake_up?tags=weights", None, "'tags' is not supported"),
        ("/wake_up?level=1", None, "level"),
        (SLEEP, {"level": "deep"}, "level"),
        (SLEEP, {"depth": 1}, "depth"),
        (SLEEP, [1], "JSON object"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(
    client: httpx.AsyncClient, fake: FakeTokenizer, url: str, body: object, named: str
) -> None:
    refused = await client.post(url, **({} if body is None else {"json": body}))  # type: ignore[arg-type]
    assert refused.status_code == 400 and named in refused.json()["error"]["message"]
    assert not fake.sleeps


async def test_another_model_is_not_found(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    for action in ("sleep", "wake"):
        answer = await client.post(f"/v1/admin/models/other/{action}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert not fake.sleeps


@pytest.mark.parametrize(
    ("code", "status"),
    [(grpc.StatusCode.FAILED_PRECONDITION, 409), (grpc.StatusCode.ABORTED, 409), (grpc.StatusCode.INTERNAL, 500)],
)
async def test_a_failure_says_why(
    client: httpx.AsyncClient, fake: FakeTokenizer, code: grpc.StatusCode, status: int
) -> None:
    fake.sleep_problem = RpcError(code, "the model cannot be woken: no such file")
    for url in (SLEEP, WAKE, "/sleep", "/wake_up"):
        answer = await client.post(url)
        assert answer.status_code == status and "no such file" in answer.json()["error"]["message"]

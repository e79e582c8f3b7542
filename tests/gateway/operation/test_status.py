"""GET /v1/status and its stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from pagewire.gateway.operation.status import routes
from pagewire.v1.admin_pb2 import (
    ExecutorStatus,
    GetStatusResponse,
    KVBlockState,
    KVGroupStatus,
    KVRun,
    RankState,
    RankStatus,
    RecentLatency,
    ReplicaStatus,
    SchedulerStatus,
    ServiceState,
    ServiceStatus,
    TokenizerStatus,
)
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

FREE, USED = KVBlockState.KV_BLOCK_STATE_FREE, KVBlockState.KV_BLOCK_STATE_USED


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "PERIOD_S", 0.02)
    monkeypatch.setattr(routes, "FRESH_S", 0.0)


def line_status(num_used: int) -> GetStatusResponse:
    group = KVGroupStatus(
        num_blocks=10,
        block_size=16,
        num_free=10 - num_used,
        num_used=num_used,
        map=[KVRun(state=USED, num_cells=num_used), KVRun(state=FREE, num_cells=10 - num_used)],
        blocks_per_cell=1,
    )
    serving, unreachable = ServiceState.SERVICE_STATE_SERVING, ServiceState.SERVICE_STATE_UNREACHABLE
    replica = ReplicaStatus(address="unix:/e0", is_attached=True, num_running=2, max_num_seqs=8, kv_groups=[group])
    ranks = [
        RankStatus(rank=0, state=RankState.RANK_STATE_READY, wait_seconds=1.5, process="process 7 on a"),
        RankStatus(rank=1, state=RankState.RANK_STATE_STARTING),
    ]
    replica.weights_version, replica.is_replacing_weights, replica.role = "d0", True, "prefill"
    return GetStatusResponse(
        services=[
            ServiceStatus(
                service="tokenizer",
                state=serving,
                pid=11,
                tokenizer=TokenizerStatus(
                    num_clients=3, time_to_first_token=RecentLatency(count=4, p50_seconds=0.25, p95_seconds=0.5)
                ),
            ),
            ServiceStatus(
                service="scheduler",
                state=serving,
                scheduler=SchedulerStatus(
                    num_running=2, num_waiting=1, generation_tokens_per_second=12.5, replicas=[replica]
                ),
            ),
            ServiceStatus(
                service="executor", state=unreachable, address="unix:/tmp/run/e1", detail="UNAVAILABLE: gone"
            ),
            ServiceStatus(service="executor", state=serving, address="unix:/e0", executor=ExecutorStatus(ranks=ranks)),
        ]
    )


async def events(client: httpx.AsyncClient) -> AsyncIterator[dict]:
    async with client.stream("GET", "/v1/status/stream") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        async for text in response.aiter_lines():
            if text:
                yield json.loads(text.removeprefix("data: "))


async def test_a_snapshot_says_how_all_services_are(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.status = line_status(4)
    status = (await client.get("/v1/status")).json()
    assert status["object"] == "status" and status["ready"] and status["num_gateways"] == 3
    states = [(one["service"], one["state"]) for one in status["services"]]
    assert states == [
        ("gateway", "serving"),
        ("tokenizer", "serving"),
        ("scheduler", "serving"),
        ("executor", "unreachable"),
        ("executor", "serving"),
    ]
    assert status["services"][3]["detail"] == "UNAVAILABLE: gone"
    assert status["requests"] == {"running": 2, "waiting": 1}
    assert status["throughput"]["generation_tokens_per_second"] == 12.5
    assert status["latency"]["time_to_first_token"] == {"count": 4, "p50": 0.25, "p95": 0.5}
    assert status["latency"]["inter_token"] == {"count": 0, "p50": None, "p95": None}
    (replica,) = status["replicas"]
    assert replica["attached"] and replica["running"] == 2 and replica["max_num_seqs"] == 8
    assert replica["weights_version"] == "d0" and replica["replacing_weights"] and replica["role"] == "prefill"
    process = {"stage": 0, "wait_seconds": 1.5, "process": "process 7 on a"}
    awaited = {"stage": 0, "wait_seconds": None, "process": ""}
    assert replica["ranks"] == [{"rank": 0, "state": "ready", **process}, {"rank": 1, "state": "starting", **awaited}]
    assert replica["groups"][0]["used"] == 4
    assert replica["groups"][0]["map"] == {"blocks_per_cell": 1, "runs": [USED, 4, FREE, 6]}


async def test_a_stream_reports_a_map_when_it_has_changed(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.status = line_status(4)
    maps = []
    async for event in events(client):
        group = event["replicas"][0]["groups"][0]
        if "map" in group:
            maps.append(group["map"]["runs"])
        elif len(maps) == 1:
            fake.status = line_status(5)
        else:
            break
    assert maps == [[USED, 4, FREE, 6], [USED, 5, FREE, 5]]


async def test_a_tokenizer_that_is_gone_is_named(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    await fake.stop()
    status = (await client.get("/v1/status")).json()
    assert not status["ready"] and status["reason"]
    assert [one["state"] for one in status["services"]] == ["not_serving", "unreachable"]
    assert status["services"][1]["detail"].startswith("UNAVAILABLE") and status["replicas"] == []


async def test_status_needs_the_key(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, api_key="secret") as client:
        for path in ("/v1/status", "/v1/status/stream"):
            assert (await client.get(path)).status_code == 401
        answer = await client.get("/v1/status", headers={"Authorization": "Bearer secret"})
        assert answer.status_code == 200


async def test_a_watching_client_does_not_keep_a_gateway_from_shutting_down(fake: FakeTokenizer, address: str) -> None:
    leave = asyncio.Event()
    async with running_gateway(address, leave, shutdown_timeout=60) as client:
        await wait_ready(client)
        async for _ in events(client):  # and the stream ends
            leave.set()


def test_both_routes_are_documented(document: dict[str, Any]) -> None:
    paths = document["paths"]
    schema = {"$ref": "#/components/schemas/Status"}
    assert paths["/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"] == schema
    event = paths["/v1/status/stream"]["get"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
    assert event["properties"]["data"]["contentSchema"] == {"anyOf": [schema]}

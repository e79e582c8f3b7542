"""A gateway before several tokenizer services without a stack: those with the same model are one line."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.gateway.models.test_lines import chat, post, states


class Fleet:
    def __init__(self, directory: Path, models: list[str]) -> None:
        self.addresses = [f"unix:{directory}/{place}.sock" for place in range(len(models))]
        self.services = [FakeTokenizer() for _ in models]
        for service, model in zip(self.services, models, strict=True):
            service.models = [model]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path, ["b", "a", "b"])
    for service, address in zip(fleet.services, fleet.addresses, strict=True):
        await service.start(address)
    yield fleet
    for service in fleet.services:
        await service.stop()


@pytest.fixture
async def gateway(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    async with running_gateway(fleet.addresses[0], tokenizer_address=",".join(fleet.addresses)) as client:
        await wait_ready(client)
        async with asyncio.timeout(10):
            while await states(client) != {"b": "ready", "a": "ready"}:
                pass
        yield client


async def test_each_model_has_its_services(gateway: httpx.AsyncClient, fleet: Fleet) -> None:
    first, second, third = fleet.services
    for _ in range(4):
        assert (await post(gateway, chat("b"))).status_code == 200
    assert len(first.received) == len(third.received) == 2 and not second.received
    assert (await post(gateway, chat("a"))).json()["model"] == "a" and len(second.received) == 1
    assert (await post(gateway, chat(None))).json()["model"] == "b", "the first in the list"
    refused = await post(gateway, chat("c"))
    assert refused.status_code == 404 and "served here: b, a" in refused.json()["error"]["message"]
    assert (await gateway.post("/v1/admin/models/a/sleep")).status_code == 200
    assert (len(first.sleeps), len(second.sleeps)) == (0, 1)


async def test_a_service_may_come_back_with_another_model(gateway: httpx.AsyncClient, fleet: Fleet) -> None:
    service = fleet.services[2]
    await service.stop()
    service.models = ["c"]
    await service.start(fleet.addresses[2])
    async with asyncio.timeout(20):
        while "c" not in await states(gateway):
            pass
    answer = await post(gateway, chat("c"))
    assert answer.json().get("model") == "c", answer.text
    assert service.received[-1].model == "c"


async def test_requests_wait_for_their_own_services(gateway: httpx.AsyncClient, fleet: Fleet) -> None:
    service = fleet.services[1]
    await service.stop()
    async with asyncio.timeout(10):
        while (await states(gateway))["a"] != "loading":
            pass
    asking = asyncio.create_task(post(gateway, chat("a")))
    assert (await post(gateway, chat("b"))).status_code == 200
    await service.start(fleet.addresses[1])
    assert (await asking).status_code == 200
    await eventually(lambda: service.received)

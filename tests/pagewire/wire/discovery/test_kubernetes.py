"""Services that Kubernetes lists, while the API server fails and recovers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pagewire.errors import StartupError
from pagewire.wire.discovery import discover, kubernetes
from pagewire.wire.discovery.kubernetes import Kubernetes
from pagewire.wire.discovery.kubernetes_api import Api
from tests.pagewire.wire.discovery.fake_kubernetes import FakeApiServer, endpoint
from tests.pagewire.wire.discovery.following import followed


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    monkeypatch.setattr(kubernetes, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(kubernetes, "MAX_BACKOFF_S", 0.05)
    fake = FakeApiServer(tmp_path)
    await fake.start()
    yield fake
    await fake.stop()


def found_by(server: FakeApiServer, *addresses: str, watch_seconds: int = 30) -> Kubernetes:
    return Kubernetes("--executor-address", addresses, Api(server.url, server.account, watch_seconds))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the state of the other side
            await asyncio.sleep(0.005)


async def test_ready_pods_are_listed_as_they_come_and_go(server: FakeApiServer) -> None:
    server.put("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=False))
    server.put("other", endpoint("10.9.9.9"), service="tokenizer")
    async with followed(found_by(server, "executor:50053")) as seen:
        await seen.until("10.0.0.1:50053")
        assert seen.lists[-1][0].host == "executor.inference.svc"
        server.put("a", endpoint("10.0.0.1"), endpoint("10.0.0.2"))
        await seen.until("10.0.0.1:50053", "10.0.0.2:50053")
        server.put("b", endpoint("10.0.0.3", ready=None))
        await seen.until("10.0.0.1:50053", "10.0.0.2:50053", "10.0.0.3:50053")
        server.put("a", endpoint("10.0.0.1", ready=False, terminating=True), endpoint("10.0.0.2"))
        await seen.until("10.0.0.2:50053", "10.0.0.3:50053")
        server.delete("a")
        await seen.until("10.0.0.3:50053")
        server.put("b")
        await seen.until()
        assert server.num_lists == 1, "the rest was watched"


async def test_services_are_named_or_chosen_by_labels(server: FakeApiServer) -> None:
    server.put("a", endpoint("10.0.0.1"), labels={"pool": "x", "tier": "1"})
    server.put("b", endpoint("10.0.0.2"), service="executor-b", labels={"pool": "x", "tier": "2"})
    server.put("c", endpoint("10.0.0.3"), service="executor-c", labels={"pool": "y"})
    for addresses, expected in {
        ("pool=x:7",): ["10.0.0.1:7", "10.0.0.2:7"],
        ("pool=x&tier=2:7",): ["10.0.0.2:7"],
        ("executor.inference:7", "pool=y:8"): ["10.0.0.1:7", "10.0.0.3:8"],
        ("executor.inference.svc:grpc",): ["10.0.0.1:50053"],
    }.items():
        async with followed(found_by(server, *addresses)) as seen:
            await seen.until(*expected)


async def test_a_pod_with_two_addresses_is_one(server: FakeApiServer) -> None:
    server.put("a6", endpoint("fd00::1", pod="one"), endpoint("fd00::2", pod="two"), addressType="IPv6")
    server.put("a4", endpoint("10.0.0.1", pod="one"))
    server.put("names", endpoint("executor.example"), addressType="FQDN")
    async with followed(found_by(server, "executor:7")) as seen:
        await seen.until("10.0.0.1:7", "[fd00::2]:7")


async def test_bookmarks_and_renewed_watches_lose_nothing(server: FakeApiServer) -> None:
    server.put("a", endpoint("10.0.0.1"))
    async with followed(found_by(server, "executor:7", watch_seconds=1)) as seen:
        await seen.until("10.0.0.1:7")
        server.put("x", endpoint("10.1.1.1"), service="other")
        server.bookmark()
        await asyncio.sleep(0.05)
        server.forget()
        await asyncio.sleep(1.2)
        server.put("b", endpoint("10.0.0.2"))
        await seen.until("10.0.0.1:7", "10.0.0.2:7")
        assert server.num_lists == 1, "the bookmark's version was not too old"


@pytest.mark.parametrize("reported_by", ["event", "status"])
async def test_a_version_that_is_gone_has_all_listed_anew(server: FakeApiServer, reported_by: str) -> None:
    server.put("a", endpoint("10.0.0.1"))
    async with followed(found_by(server, "executor:7", watch_seconds=1)) as seen:
        await seen.until("10.0.0.1:7")
        await until(lambda: server.num_watching)
        if reported_by == "event":
            server.fail_watches(410)
        else:
            server.put("x", endpoint("10.1.1.1"), service="other")
            server.forget()
        await until(lambda: server.num_lists >= 2)
        server.put("a", endpoint("10.0.0.2"))
        await seen.until("10.0.0.2:7")


async def test_what_was_known_stays_while_the_server_is_away(
    server: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.put("a", endpoint("10.0.0.1"))
    server.put("b", endpoint("10.0.0.2"))
    async with followed(found_by(server, "executor:7")) as seen:
        await seen.until("10.0.0.1:7", "10.0.0.2:7")
        await server.stop()
        server.delete("b")
        server.forget()
        await until(lambda: "Kubernetes does not list" in caplog.text)
        await asyncio.sleep(0.2)
        assert len(seen.lists) == 1
        assert caplog.text.count("Kubernetes does not list") == 1, "said once"
        await server.start()
        await seen.until("10.0.0.1:7")


async def test_a_token_is_read_again_when_it_was_renewed(
    server: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.put("a", endpoint("10.0.0.1"))
    async with followed(found_by(server, "executor:7")) as seen:
        await seen.until("10.0.0.1:7")
        await until(lambda: server.num_watching)
        server.tokens = {"a-newer-one"}
        server.fail_watches(500)
        await until(lambda: "500: so it is" in caplog.text)
        (server.account / "token").write_text("a-newer-one")
        server.put("a", endpoint("10.0.0.2"))
        await seen.until("10.0.0.2:7")


async def test_a_refusal_names_the_permission_that_it_takes(
    server: FakeApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with followed(found_by(server, "executor.elsewhere:7")) as seen:
        await until(lambda: "a role that may list and watch endpointslices" in caplog.text)
        assert seen.addresses is None


@pytest.mark.parametrize("address", ["executor", "https://executor:7", "executor:", ":7"])
async def test_addresses_name_services(server: FakeApiServer, address: str) -> None:
    with pytest.raises(StartupError, match="--executor-address"):
        found_by(server, address)


def test_outside_of_a_pod_it_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(StartupError, match="not in a pod"):
        discover("kubernetes", "--executor-address", "executor:7")
    with pytest.raises(StartupError, match="automountServiceAccountToken"):
        Api("https://localhost:1", tmp_path)

"""The tokenizer's port for clients asks for keys; the one for gateways does not."""

import asyncio
from pathlib import Path

import grpc
import pytest

from pagewire.client import Client
from pagewire.tools.keys import KeysAddConfig, add
from pagewire.v1 import inference_pb2
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from pagewire.wire import rpc
from pagewire.wire.rpc import RpcError
from tests.services.public_doors import check_doors, served_methods, status_of
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def public(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/public.sock"


@pytest.fixture
def make_line(tmp_path: Path, smollm2_gguf: Path, public: str):
    def make(**config: object) -> TokenizerLine:
        fake = FakeScheduler(lambda request: [400, 401, 402, EOS])
        return TokenizerLine(tmp_path, fake, smollm2_gguf, public_listen=public, **config)

    return make


def new(keys: Path, name: str, **settings: float) -> str:
    return add(keys, KeysAddConfig(name=name, **settings))  # type: ignore[arg-type]


async def test_every_public_rpc_but_health_refuses_without_a_key(make_line, pool, public) -> None:
    async with make_line(api_key="secret").running(pool=pool) as line, rpc.channel(public) as channel:
        methods = await check_doors(channel, "secret")
        assert {"/pagewire.v1.InferenceService/Generate", "/pagewire.v1.AdminService/GetMetrics"} <= set(methods)
        assert await line.stub.ListModels(inference_pb2.ListModelsRequest()), "gateways send no key"


async def test_without_keys_no_client_needs_one(make_line, pool, public) -> None:
    async with make_line().running(pool=pool), Client(public) as client:
        assert await client.models()


async def test_the_key_is_the_tenant(make_line, pool, public, keys) -> None:
    alice = new(keys, "alice", weight=2)
    async with make_line(api_key_file=str(keys)).running(pool=pool) as line:
        async with Client(public, alice) as client:
            assert [response async for response in client.generate("a")]
        async with Client(public, "wrong") as client:
            with pytest.raises(RpcError, match="missing or wrong API key") as refused:
                await client.models()
    (submission,) = line.scheduler.submissions
    assert (submission.context.tenant, submission.context.tenant_weight) == ("alice", 2)
    assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED


async def test_what_changes_the_service_wants_a_key_that_may(make_line, pool, public, keys) -> None:
    user, operator = new(keys, "user"), new(keys, "operator", admin=True)
    guarded = ("ReplaceWeights", "ResetPrefixCache", "SubscribeKvEvents")
    changes = [f"/pagewire.v1.AdminService/{method}" for method in guarded]
    async with make_line(api_key_file=str(keys)).running(pool=pool), rpc.channel(public) as channel:
        for change in changes:
            refused = await status_of(channel, change, authorization=f"Bearer {user}")
            assert refused is grpc.StatusCode.PERMISSION_DENIED
            let_in = await status_of(channel, change, authorization=f"Bearer {operator}")
            assert let_in not in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
        for method in ("GetMetrics", "GetStatus"):
            name = f"/pagewire.v1.AdminService/{method}"
            assert await status_of(channel, name, authorization=f"Bearer {user}") is grpc.StatusCode.OK


async def test_clients_may_see_nothing_of_the_service(make_line, pool, public) -> None:
    async with make_line(public_admin=False).running(pool=pool), rpc.channel(public) as channel:
        assert not [name for name in await served_methods(channel) if "AdminService" in name]
        assert await status_of(channel, "/pagewire.v1.AdminService/GetMetrics") is grpc.StatusCode.UNIMPLEMENTED


async def test_a_client_takes_its_key_from_the_environment(make_line, pool, public, monkeypatch) -> None:
    monkeypatch.setenv("PAGEWIRE_API_KEY", "secret")
    async with make_line(api_key="secret").running(pool=pool), Client(public) as client:
        assert await client.models()


async def test_limits_hold_for_streams_and_calls(make_line, pool, public, keys) -> None:
    one, few = new(keys, "one", max_running=1), new(keys, "few", requests_per_minute=1)
    line = make_line(api_key_file=str(keys))
    line.scheduler.auto = False
    async with line.running(pool=pool), rpc.channel(public) as channel:
        mine = (("authorization", f"Bearer {one}"),)
        call = InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(text="a"), metadata=mine)
        async with asyncio.timeout(20):
            while not line.scheduler.requests:  # noqa: ASYNC110 - the state of a service
                await asyncio.sleep(0.005)
        async with Client(public, one) as client:
            with pytest.raises(RpcError, match="as many running requests") as refused:
                await client.tokenize("a")
            assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await client.models(), "what computes nothing has no limit"
            line.scheduler.auto = True
            line.scheduler.step()
            assert [response async for response in call]
            assert await client.tokenize("a")
        async with Client(public, few) as client:
            assert await client.tokenize("a")
            with pytest.raises(RpcError, match="few has sent 1 requests a minute") as refused:
                await client.tokenize("a")
            assert refused.value.retry_delay is not None and 0 < refused.value.retry_delay <= 60

"""What every log of kept generations does, whatever it is made of."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from pagewire.errors import StartupError
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.kept.keeper import open_log
from pagewire.gateway.kept.log import Append, Bounds, Log
from pagewire.gateway.kept.redis_log import RedisLog
from pagewire.gateway.kept.sqlite_log import SqliteLog
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.gateway.test_kept import BODY, CHAT, KEY, events, id_of, read_until

LEASE_S = 0.5
ROOM = Bounds(count=100, bytes=100_000, ttl_s=60)
OpenLog = Callable[[Bounds], Log]


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if (server := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not installed")
    directory = tmp_path_factory.mktemp("redis")
    socket = directory / "redis.sock"
    process = subprocess.Popen(
        [server, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(directory)],
        stdout=subprocess.DEVNULL,
    )
    try:
        while not socket.exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(params=["disk", "redis"])
async def open_one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenLog]:
    logs: list[Log] = []

    def open_one(bounds: Bounds) -> Log:
        if request.param == "disk":
            logs.append(SqliteLog(tmp_path / "generations.db", bounds, LEASE_S))
        else:
            logs.append(RedisLog(request.getfixturevalue("redis_url"), bounds, LEASE_S))
        return logs[-1]

    if request.param == "redis":
        redis = RedisLog(request.getfixturevalue("redis_url"), ROOM)
        await redis._redis.flushall()
        await redis.close()
    yield open_one
    for log in logs:
        await log.close()


def entry(owner: str, number: int, value: bytes = b"v", *, is_last: bool = False, id: str = "g") -> Append:
    return Append(id, owner, number, value, is_last)


async def test_one_writes_at_a_time_and_all_read(open_one: OpenLog) -> None:
    mine, yours = open_one(ROOM), open_one(ROOM)
    assert await mine.find("g") is None and await mine.read("g", 0) is None
    assert not await mine.claim("g", "nobody")
    assert await mine.begin("g", b"first") == b"first"
    assert await yours.begin("g", b"second") == b"first" == await yours.find("g")
    assert await mine.claim("g", "me")
    assert not await yours.claim("g", "you")
    assert await mine.append([entry("me", 0, b"a\x00"), entry("you", 0), entry("me", 1, b"b")]) == [True, False, True]
    tail = await yours.read("g", 1)
    assert tail is not None and (tail.values, tail.ended, tail.is_free) == ([b"b"], False, False)
    await yours.release("g", "you")
    assert not await yours.claim("g", "you")
    await mine.release("g", "me")
    assert await yours.claim("g", "you")
    assert await mine.append([entry("me", 2)]) == [False]
    assert await yours.append([entry("you", 2, b"c", is_last=True)]) == [True]
    tail = await mine.read("g", 0)
    assert tail is not None and (tail.values, tail.ended) == ([b"a\x00", b"b", b"c"], True)
    assert not await mine.claim("g", "me")


async def test_a_lease_that_nobody_renews_runs_out(open_one: OpenLog) -> None:
    mine, yours = open_one(ROOM), open_one(ROOM)
    await mine.begin("g", b"")
    assert await mine.claim("g", "me")
    async with asyncio.timeout(20):
        for _ in range(8):
            await asyncio.sleep(LEASE_S / 5)
            await mine.renew([("g", "me")])
            assert not await yours.claim("g", "you")
        while not await yours.claim("g", "you"):  # noqa: ASYNC110 - time is what it is about
            await asyncio.sleep(LEASE_S / 10)
    await mine.renew([("g", "me")])
    assert await mine.append([entry("me", 0)]) == [False]


async def test_the_oldest_at_rest_make_room(open_one: OpenLog) -> None:
    log = open_one(Bounds(count=3, bytes=1000, ttl_s=60))
    for id in "abc":
        await log.begin(id, b"")
    assert await log.claim("a", "me")
    await log.begin("d", b"")
    assert [id for id in "abcd" if await log.find(id) is not None] == ["a", "c", "d"]
    assert await log.append([entry("me", 0, b"x" * 990, id="a"), entry("me", 1, b"x" * 9, id="a")]) == [True, True]
    assert [id for id in "acd" if await log.find(id) is not None] == ["a", "c", "d"]
    await log.append([entry("me", 2, b"xx", id="a")])
    assert [id for id in "acd" if await log.find(id) is not None] == []
    for id in "ef":
        await log.begin(id, b"y" * 600)
    assert [id for id in "ef" if await log.find(id) is not None] == ["f"]


async def test_generations_expire_at_rest(open_one: OpenLog) -> None:
    log = open_one(Bounds(count=3, bytes=1000, ttl_s=0.2))
    for id in "ab":
        await log.begin(id, b"old")
    assert await log.claim("a", "me")
    await log.append([entry("me", 0, id="b")])
    async with asyncio.timeout(20):
        while await log.find("b") is not None:
            await asyncio.sleep(0.02)
            await log.renew([("a", "me")])
    assert await log.find("a") == b"old"
    assert await log.begin("b", b"new") == b"new"


async def test_gateways_share_redis(fake: FakeTokenizer, address: str, tmp_path: Path, redis_url: str) -> None:
    """And nothing else."""
    stores = [{"generation_store": redis_url, "data_dir": str(tmp_path / name)} for name in ("one", "two")]
    async with running_gateway(address, **stores[0]) as first, running_gateway(address, **stores[1]) as second:
        await wait_ready(first)
        await wait_ready(second)
        begun = await read_until(first, CHAT, BODY, 7, **KEY)
        rest = await second.post(CHAT, json=BODY, headers={"Last-Event-ID": id_of(events(begun)[-1])})
        assert begun + rest.text == (await first.post(CHAT, json=BODY, headers=KEY)).text


async def test_a_store_that_cannot_be_used_is_named(fake: FakeTokenizer, address: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="disk, memory or a URL"):
        open_log("elsewhere", tmp_path, ROOM)
    async with running_gateway(address, generation_store=f"unix://{tmp_path}/none.sock") as client:
        await wait_ready(client)
        refused = await client.post(CHAT, json=BODY, headers=KEY)
        assert refused.status_code == 503 and "--generation-store" in refused.json()["error"]["message"]
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    log = RedisLog(f"unix://{tmp_path}/none.sock", ROOM)
    with pytest.raises(ApiError, match="does not answer"):
        await log.find("g")
    await log.close()

"""The guarantees of a log of kept generations, with each of its stores."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from pagewire.errors import StartupError
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store import Bounds, Lease, Log, open_log
from pagewire.gateway.store.database import Database
from pagewire.gateway.store.log import Append, Standing
from pagewire.gateway.store.redis_log import RedisLog
from pagewire.gateway.store.sqlite_log import SqliteLog
from pagewire.wire.local import unix_sockets
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.gateway.kept.test_kept import BODY, CHAT, KEY, events, id_of, read_until

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
        while not unix_sockets.is_served(str(socket)):  # it exists before it listens
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
            logs.append(SqliteLog(Database(tmp_path / "pagewire.db"), "kept", bounds, LEASE_S))
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


def entry(lease: Lease, number: int, value: bytes = b"v", *, is_last: bool = False) -> Append:
    return Append(lease, number, value, is_last)


async def claimed(log: Log, id: str) -> Lease:
    lease = await log.claim(id)
    assert lease is not None
    return lease


async def test_one_process_writes_at_a_time_and_all_read(open_one: OpenLog) -> None:
    mine, yours = open_one(ROOM), open_one(ROOM)
    assert await mine.find("g") is None and await mine.read("g", 0) is None
    assert await mine.claim("g") is None
    assert await mine.begin("g", b"first") == b"first"
    assert await yours.begin("g", b"second") == b"first" == await yours.find("g")
    me, stranger = await claimed(mine, "g"), Lease("kept", "g")
    assert await yours.claim("g") is None
    assert await mine.append([entry(me, 0, b"a\x00"), entry(stranger, 0), entry(me, 1, b"b")]) == [True, False, True]
    tail = await yours.read("g", 1)
    assert tail is not None and (tail.values, tail.ended, tail.is_free) == ([b"b"], False, False)
    await yours.release(stranger)
    assert await yours.claim("g") is None
    await mine.release(me)
    you = await claimed(yours, "g")
    assert await mine.append([entry(me, 2)]) == [False]
    assert await yours.append([entry(you, 2, b"c", is_last=True)]) == [True]
    tail = await mine.read("g", 0)
    assert tail is not None and (tail.values, tail.ended) == ([b"a\x00", b"b", b"c"], True)
    assert await mine.claim("g") is None


async def test_a_lease_that_is_not_renewed_expires(open_one: OpenLog) -> None:
    mine, yours = open_one(ROOM), open_one(ROOM)
    await mine.begin("g", b"")
    me = await claimed(mine, "g")
    async with asyncio.timeout(20):
        for _ in range(8):
            await asyncio.sleep(LEASE_S / 5)
            assert await mine.renew([me]) == [Standing.HELD]
            assert await yours.claim("g") is None
        while (you := await yours.claim("g")) is None:  # noqa: ASYNC110 - time is what it is about
            await asyncio.sleep(LEASE_S / 10)
    assert await mine.renew([me]) == [Standing.LOST]
    assert await yours.renew([you]) == [Standing.HELD]
    assert await mine.append([entry(me, 0)]) == [False]


async def test_the_oldest_at_rest_make_room(open_one: OpenLog) -> None:
    log = open_one(Bounds(count=3, bytes=1000, ttl_s=60))
    for id in "abc":
        await log.begin(id, b"")
    a = await claimed(log, "a")
    await log.begin("d", b"")
    assert [id for id in "abcd" if await log.find(id) is not None] == ["a", "c", "d"]
    assert await log.append([entry(a, 0, b"x" * 990), entry(a, 1, b"x" * 9)]) == [True, True]
    assert [id for id in "acd" if await log.find(id) is not None] == ["a", "c", "d"]
    await log.append([entry(a, 2, b"xx")])
    assert [id for id in "acd" if await log.find(id) is not None] == []
    for id in "ef":
        await log.begin(id, b"y" * 600)
    assert [id for id in "ef" if await log.find(id) is not None] == ["f"]


async def test_generations_expire_at_rest(open_one: OpenLog) -> None:
    log = open_one(Bounds(count=3, bytes=1000, ttl_s=0.2))
    for id in "ab":
        await log.begin(id, b"old")
    a = await claimed(log, "a")
    await log.append([entry(Lease("kept", "b"), 0)])
    async with asyncio.timeout(20):
        while await log.find("b") is not None:
            await asyncio.sleep(0.02)
            await log.renew([a])
    assert await log.find("a") == b"old"
    assert await log.begin("b", b"new") == b"new"


async def test_gateways_share_redis(fake: FakeTokenizer, address: str, tmp_path: Path, redis_url: str) -> None:
    """The gateways share no directory."""
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

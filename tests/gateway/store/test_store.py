"""The store: a gateway process finds the documents of others, continues their jobs and may end them."""

import asyncio
import dataclasses
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest

from pagewire.errors import StartupError
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store import Bound, Bounds, LeaseLost, Store, data_directory, database, failure, held, open_log
from pagewire.gateway.store import store as store_module
from pagewire.gateway.store.database import SCRIPTS, Database

LEASE_S = 0.8
BOUNDS = Bounds(count=10, bytes=50, ttl_s=60, drops_unfinished=False)


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[tuple[Store, Store]]:
    """Two stores of one directory, like those of two processes."""
    pair = Store(tmp_path / "data"), Store(tmp_path / "data")
    yield pair
    for store in pair:
        await store.close()


async def test_documents_are_seen_by_all_processes(stores: tuple[Store, Store]) -> None:
    mine, yours = (store.documents("notes") for store in stores)
    await mine.put("a", b"1")
    found = await yours.get("a")
    assert found is not None and (found.value, found.expires_at) == (b"1", None)
    assert abs(found.created_at - time.time()) < 60
    await yours.put("a", b"2")
    assert [document.value for document in await mine.list() or []] == [b"2"]
    assert await stores[0].documents("others").get("a") is None
    assert await mine.delete("a")
    assert not await yours.delete("a")
    assert await yours.get("a") is None


async def test_documents_outlive_the_process(tmp_path: Path) -> None:
    store = Store(tmp_path)
    await store.documents("notes").put("a", b"1")
    await store.close()
    store = Store(tmp_path)
    assert [document.id for document in await store.documents("notes").list() or []] == ["a"]
    await store.close()


async def test_lists_go_page_by_page(stores: tuple[Store, Store]) -> None:
    notes = stores[0].documents("notes")
    for id in "cabd":
        await notes.put(id, b"")
    await notes.put("c", b"replaced: it keeps its place")

    async def ids(**options: object) -> str | None:
        page = await notes.list(**options)
        return None if page is None else "".join(document.id for document in page)

    assert await ids() == "cabd"
    assert await ids(newest_first=True, limit=2) == "db"
    assert await ids(newest_first=True, after="b") == "ac"
    assert await ids(after="a", limit=1) == "b"
    assert await ids(after="d") == ""
    assert await ids(after="unknown") is None


async def test_documents_are_their_owners(stores: tuple[Store, Store]) -> None:
    notes = stores[0].documents("notes")
    for id, owner in (("a", "alice"), ("b", "bob"), ("c", "alice"), ("n", "")):
        await notes.put(id, b"1", owner=owner)
    await notes.put("a", b"2", owner="bob")

    async def ids(*owner: str, **options: object) -> str | None:
        page = await notes.list(*owner, **options)
        return None if page is None else "".join(document.id for document in page)

    assert [await ids("alice"), await ids("bob"), await ids(""), await ids()] == ["ac", "b", "n", "abcn"]
    assert await ids("alice", after="b") is None and await ids("alice", after="a") == "c"
    assert await notes.get("a", "bob") is None and await notes.get("a", "") is None
    found = await notes.get("a", "alice")
    assert found is not None and found.value == b"2"
    assert not await notes.delete("a", "bob") and await notes.get("a") is not None
    assert await notes.delete("a", "alice")


def directory_of_version(version: int, directory: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(directory / "pagewire.db")
    connection.executescript("".join(SCRIPTS[:version]) + f"PRAGMA user_version = {version};")
    return connection


async def test_documents_from_before_there_were_owners_belong_to_no_tenant(tmp_path: Path) -> None:
    with closing(directory_of_version(1, tmp_path)) as connection, connection:
        connection.execute("INSERT INTO documents (collection, id, value, created_at) VALUES ('notes', 'a', x'31', 1)")
    for _ in range(2):
        store = Store(tmp_path)
        found = await store.documents("notes").get("a", "")
        assert found is not None and found.value == b"1"
        await store.close()


async def test_jobs_from_before_there_was_a_log_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with closing(directory_of_version(2, tmp_path)) as connection, connection:
        connection.execute("INSERT INTO jobs (kind, id, cancelled_at) VALUES ('batch', 'b', 5)")
        connection.execute("INSERT INTO jobs (kind, id, owner, lost_leases) VALUES ('response', 'r', 'died', 1)")
        for id in ("r/request", "r/0", "ended/0"):
            values = ("response_output", id, id.encode(), 1)
            connection.execute("INSERT INTO documents (collection, id, value, created_at) VALUES (?, ?, ?, ?)", values)
    (tmp_path / "generations.db").touch()
    for _ in range(2):
        store = Store(tmp_path)
        await open_log("disk", tmp_path, BOUNDS).close()
        await store.close()
    assert [record.name for record in caplog.records] == [database.__name__, store_module.__name__]
    assert not await asyncio.to_thread((tmp_path / "generations.db").exists)
    store = Store(tmp_path)
    responses, batches = store.jobs("response", BOUNDS), store.jobs("batch")
    assert await responses.log.find("r") == b"r/request"
    lease = await responses.next()
    assert (lease.id, lease.lost_leases) == ("r", 2)
    await responses.end(lease)
    assert (await batches.next()).cancelled.is_set()
    assert await store.documents("response_output").list() == []
    assert await store.documents("jobs/response").total() == (1, 0)
    await store.close()


async def test_an_ended_job_keeps_its_entries_within_the_bounds(stores: tuple[Store, Store]) -> None:
    jobs = stores[0].jobs("work", BOUNDS)
    for id in "abc":
        await jobs.log.begin(id, b"request")
        lease = await jobs.next()
        async with jobs.hold(lease):
            await jobs.append(lease, 0, id.encode() * 20)
            await jobs.end(lease)
        tail = await jobs.log.read(id, 0)
        assert tail is not None and (tail.values, tail.ended) == ([id.encode() * 20], True)
        assert await jobs.log.find(id) == b"", "its request is of no more use"
        assert not await jobs.cancel(id) and await jobs.log.claim(id) is None
    assert [id for id in "abc" if await jobs.log.read(id, 0) is not None] == ["b", "c"]
    unbounded = stores[0].jobs("play")
    await unbounded.log.begin("a", b"")
    await unbounded.end(await unbounded.next())
    assert await unbounded.log.read("a", 0) is None


async def test_unfinished_jobs_stay_and_leave_no_room_for_more(stores: tuple[Store, Store]) -> None:
    jobs = stores[0].jobs("work", dataclasses.replace(BOUNDS, ttl_s=0.0))
    notes = stores[0].documents("notes")
    await jobs.log.begin("a", b"first")
    lease = await jobs.next()
    async with jobs.hold(lease):
        await jobs.append(lease, 0, bytes(200))  # what runs may grow to its end
        with pytest.raises(ApiError, match="too many") as refused:
            await notes.put("b", b"", first=lambda connection: jobs.log.add(connection, "b", b"second"))
        assert refused.value.status == 503 and await notes.get("b") is None
        await jobs.end(lease)
    await notes.put("b", b"", first=lambda connection: jobs.log.add(connection, "b", b"second"))
    assert await jobs.log.read("a", 0) is None
    assert await jobs.log.find("b") == b"second"


async def test_what_has_expired_is_gone(stores: tuple[Store, Store]) -> None:
    notes = stores[0].documents("notes")
    await notes.put("old", b"12345", expires_at=time.time() - 1)
    await notes.put("new", b"123", expires_at=time.time() + 100)
    assert await notes.get("old") is None
    assert not await notes.delete("old")
    assert [document.id for document in await notes.list() or []] == ["new"]
    assert await notes.total() == (1, 3)


async def test_a_bound_makes_room(stores: tuple[Store, Store]) -> None:
    notes = stores[0].documents("notes", Bound(count=3, bytes=100))
    others = stores[0].documents("others")
    await others.put("a", bytes(1000))
    for number in range(5):
        await notes.put(str(number), bytes(10))
    assert await notes.total() == (3, 30)
    await notes.put("3", bytes(85))
    assert [document.id for document in await notes.list() or []] == ["3", "4"]
    with pytest.raises(ApiError, match="101 bytes are more than the 100") as refused:
        await notes.put("5", bytes(101))
    assert refused.value.status == 413
    assert await others.total() == (1, 1000)


async def test_a_job_has_one_owner_until_that_one_dies(stores: tuple[Store, Store]) -> None:
    mine, yours = (store.jobs("work", lease_s=LEASE_S, poll_s=0.02) for store in stores)
    waiting = asyncio.create_task(yours.next())
    await mine.log.begin("a", b"")
    first = await waiting
    assert (first.id, first.lost_leases) == ("a", 0)
    assert await mine.log.claim() is None
    assert await stores[0].jobs("play").log.claim() is None
    async with asyncio.timeout(10):
        second = await mine.next()  # the lease was not renewed
    assert (second.id, second.lost_leases) == ("a", 1)
    with pytest.raises(LeaseLost):
        await yours.end(first)
    notes = stores[1].documents("notes")
    with pytest.raises(LeaseLost):
        await notes.put("of a", b"late", first=held(first))
    assert await notes.get("of a") is None
    await notes.put("of a", b"in time", first=held(second))
    with pytest.raises(LeaseLost):
        await notes.put("of a", b"late", first=held(first), adds=False)
    assert await notes.put("of a", b"done", first=held(second), adds=False)
    assert await notes.delete("of a")
    assert not await notes.put("of a", b"again", first=held(second), adds=False)
    assert await notes.get("of a") is None
    await mine.end(second)
    assert await yours.log.claim() is None


async def test_a_lease_that_is_renewed_stays(stores: tuple[Store, Store]) -> None:
    mine, yours = (store.jobs("work", lease_s=LEASE_S, poll_s=0.02) for store in stores)
    await mine.log.begin("a", b"")
    lease = await mine.next()
    async with mine.hold(lease):
        await asyncio.sleep(2 * LEASE_S)
        assert await yours.log.claim() is None
        assert not lease.is_lost
    # It was released: the next owner need not wait, and no owner died.
    again = await yours.log.claim()
    assert again is not None and again.lost_leases == 0


async def test_an_owner_learns_that_it_lost_its_lease(stores: tuple[Store, Store]) -> None:
    mine, yours = (store.jobs("work", lease_s=LEASE_S, poll_s=0.02) for store in stores)
    await mine.log.begin("a", b"")
    lease = await mine.next()
    async with asyncio.timeout(10):
        taken = await yours.next()
        with pytest.raises(LeaseLost):
            async with mine.hold(lease):
                await asyncio.Future()
    await yours.log.release(taken)
    again = await yours.next()
    assert again.lost_leases == 0, "its owner was slow, and did not die"
    await yours.end(again)


async def test_a_cancellation_reaches_the_owner(stores: tuple[Store, Store]) -> None:
    mine, yours = (store.jobs("work", lease_s=LEASE_S, poll_s=0.02) for store in stores)
    assert not await mine.cancel("a")
    await mine.log.begin("a", b"")
    lease = await mine.next()
    assert await yours.log.cancelled_at("a") is None
    async with mine.hold(lease):
        assert await yours.cancel("a")
        async with asyncio.timeout(10):
            await lease.cancelled.wait()
        marked = await mine.log.cancelled_at("a")
        assert marked is not None
        assert await mine.cancel("a")
        assert await yours.log.cancelled_at("a") == marked
        await mine.end(lease)
    assert not await yours.cancel("a")


async def test_a_process_may_take_its_own_job_again(stores: tuple[Store, Store]) -> None:
    """A process sleeps for longer than its lease."""
    jobs = stores[0].jobs("work")
    await jobs.log.begin("a", b"")
    first = await jobs.next()
    async with AsyncExitStack() as later:
        with pytest.raises(LeaseLost):
            async with jobs.hold(first):
                await (
                    stores[1]
                    .documents("notes")
                    .database.write(lambda database: database.execute("UPDATE jobs SET leased_until = 0"))
                )
                second = await jobs.next()
                await later.enter_async_context(jobs.hold(second))
                await asyncio.Future()
        assert await jobs.cancel("a")
        assert second.cancelled.is_set() and not first.cancelled.is_set()
        await jobs.end(second)


async def test_a_full_disk_fails_the_request_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_logged", {})
    store = Store(tmp_path / "full")
    notes = store.documents("notes")
    await notes.put("a", b"1")
    await store._database.read(lambda connection: connection.execute("PRAGMA max_page_count = 1").fetchall())
    for _ in range(3):
        with pytest.raises(ApiError, match="no space is left") as full:
            await notes.put("b", bytes(100_000))
        assert full.value.status == 507 and str(tmp_path) not in full.value.message, "paths are the operator's"
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and f"--data-dir {tmp_path}/full: no space is left" in errors[0]
    found = await notes.get("a")
    assert found is not None and found.value == b"1"
    assert await notes.delete("a")
    await store.close()


def damage(path: Path) -> None:
    path.write_bytes(b"not a database" * 1000)


def newer(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize(("change", "message"), [(damage, "not a database"), (newer, "schema 99")])
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, change: object, message: str) -> None:
    change(tmp_path / "pagewire.db")
    with pytest.raises(StartupError, match=rf"--data-dir {tmp_path}: .*{message}"):
        Store(tmp_path)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=rf"--data-dir {tmp_path}/file/data cannot be written"):
        Store(tmp_path / "file" / "data")


def test_a_gateway_does_not_start_without_its_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "pagewire.cli", "gateway", "--port", "0", "--data-dir", str(tmp_path / "file")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert (
        f"--data-dir {tmp_path}/file cannot be written (Not a directory): name one" in ended.stderr
        and "Traceback" not in ended.stderr
    )


def test_each_port_has_a_directory_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_directory(None, 8000) == tmp_path / "pagewire" / "gateway-8000"
    assert data_directory("~/x", 8000) == Path.home() / "x"
    monkeypatch.setenv("XDG_DATA_HOME", "")
    assert data_directory(None, 1) == Path.home() / ".local" / "share" / "pagewire" / "gateway-1"


async def test_a_document_and_its_job_come_together(stores: tuple[Store, Store]) -> None:
    notes, jobs = stores[0].documents("notes"), stores[0].jobs("work")
    await notes.put("a", b"1", first=lambda connection: jobs.log.add(connection, "a", b""))
    assert (await jobs.next()).id == "a"
    with pytest.raises(ApiError):  # there is such a job
        await notes.put("a", b"2", first=lambda connection: jobs.log.add(connection, "a", b""))
    found = await notes.get("a")
    assert found is not None and found.value == b"1"


@pytest.mark.parametrize("share", [0.0001, 0.1, 0.5, 0.9])
async def test_a_truncated_database_is_refused_with_the_remedy(tmp_path: Path, share: float) -> None:
    store = Store(tmp_path)
    documents = store.documents("things")
    for number in range(50):
        await documents.put(f"thing-{number}", bytes(3000))
    await store.close()
    path = tmp_path / "pagewire.db"
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(StartupError, match="move a damaged one away"):
        Store(tmp_path)


async def test_gateways_that_open_a_new_directory_at_once_wait_for_each_other(tmp_path: Path) -> None:
    def opened(path: Path) -> Database:
        together.wait()
        return Database(path)

    for number in range(40):
        together, path = threading.Barrier(4), tmp_path / f"{number}.db"
        databases = await asyncio.gather(*(asyncio.to_thread(opened, path) for _ in range(4)))
        for opened_one in databases:
            await opened_one.close()

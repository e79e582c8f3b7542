"""Jobs: work that some gateway process does, and another takes over if that one dies."""

import asyncio
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.database import Database
from pagewire.wire import rpc

# A job whose owner was not heard of for so long goes to another.
LEASE_S = 5.0
# How often owners renew their leases and see cancellations, and others look for jobs.
POLL_S = 1.0


class LeaseLost(Exception):
    """Another process has the job, or it is gone."""


@dataclass(eq=False)
class Lease:
    """A job in the hands of this process. `cancelled` and `lost` are set while `Jobs.hold` renews it."""

    kind: str
    id: str  # of the job
    owner: str
    lost_leases: int  # owners before this one that vanished
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)


def check_held(connection: sqlite3.Connection, lease: Lease) -> None:
    """Raises LeaseLost. Within the transaction of a write, nobody can take the job before it is done."""
    held = "SELECT 1 FROM jobs WHERE kind = ? AND id = ? AND owner = ?"
    if connection.execute(held, (lease.kind, lease.id, lease.owner)).fetchone() is None:
        raise LeaseLost(lease.id)


class Jobs:
    """The jobs of one kind, first come, first served. Every method raises ApiError if the store fails."""

    def __init__(self, database: Database, kind: str, lease_s: float = LEASE_S, poll_s: float = POLL_S) -> None:
        self._database = database
        self._kind = kind
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._added = asyncio.Event()
        self._held: dict[str, Lease] = {}

    async def add(self, id: str) -> None:
        """Some process will take it, this one at once if it waits in next()."""
        await self._database.write(lambda connection: self.insert(connection, id))
        self.wake()

    def insert(self, connection: sqlite3.Connection, id: str) -> None:
        """add() within a transaction; wake() follows it."""
        connection.execute("INSERT INTO jobs (kind, id) VALUES (?, ?)", (self._kind, id))

    def wake(self) -> None:
        """Has next() look at once."""
        self._added.set()

    async def next(self) -> Lease:
        """Waits for a job that nobody has."""
        while True:
            self._added.clear()
            if (lease := await self.take()) is not None:
                return lease
            try:
                await asyncio.wait_for(self._added.wait(), self._poll_s)
            except TimeoutError:
                pass

    async def take(self, id: str | None = None) -> Lease | None:
        """A job that nobody has, or whose owner has vanished; the one of this id, if that is such."""
        owner, now = uuid.uuid4().hex, time.time()

        def free(connection: sqlite3.Connection) -> tuple[str, str | None, int] | None:
            row: tuple[str, str | None, int] | None = connection.execute(
                "SELECT id, owner, lost_leases FROM jobs WHERE kind = ? AND leased_until <= ?"
                " AND id = coalesce(?, id) ORDER BY seq LIMIT 1",
                (self._kind, now, id),
            ).fetchone()
            return row

        def work(connection: sqlite3.Connection) -> Lease | None:
            if (row := free(connection)) is None:
                return None
            id, vanished, lost_leases = row
            lost_leases += vanished is not None
            connection.execute(
                "UPDATE jobs SET owner = ?, leased_until = ?, lost_leases = ? WHERE kind = ? AND id = ?",
                (owner, now + self._lease_s, lost_leases, self._kind, id),
            )
            return Lease(self._kind, id, owner, lost_leases)

        # Whoever only looks takes no lock.
        if await self._database.read(free) is None:
            return None
        return await self._database.write(work)

    @asynccontextmanager
    async def hold(self, lease: Lease) -> AsyncIterator[None]:
        """Renews the lease; gives the job back at the end, unless it was finished or lost."""
        self._held[lease.id] = lease
        renewing = asyncio.create_task(self._renew(lease))
        try:
            yield
        finally:
            await rpc.cancel([renewing])
            if self._held.get(lease.id) is lease:  # else this process has taken it again, after a long sleep
                del self._held[lease.id]
            if not lease.lost.is_set():
                with suppress(ApiError):  # then it runs out
                    await self._give_back(lease)

    async def finish(self, lease: Lease) -> None:
        """The job is done. Raises LeaseLost."""

        def work(connection: sqlite3.Connection) -> None:
            check_held(connection, lease)
            connection.execute("DELETE FROM jobs WHERE kind = ? AND id = ?", (lease.kind, lease.id))

        await self._database.write(work)

    async def cancel(self, id: str) -> bool:
        """Marks the job for its owner, this one or the next, who ends it. Whether there is such a job."""
        statement = "UPDATE jobs SET cancelled_at = coalesce(cancelled_at, ?) WHERE kind = ? AND id = ?"
        values = (time.time(), self._kind, id)
        exists = await self._database.write(lambda connection: connection.execute(statement, values).rowcount > 0)
        if exists and id in self._held:
            self._held[id].cancelled.set()
        return exists

    async def cancelled_at(self, id: str) -> float | None:
        """Unix time of the first cancel() of a job that has not ended yet."""
        statement = "SELECT cancelled_at FROM jobs WHERE kind = ? AND id = ?"
        row = await self._database.read(lambda connection: connection.execute(statement, (self._kind, id)).fetchone())
        return row and row[0]

    async def _renew(self, lease: Lease) -> None:
        expected_end = time.monotonic() + self._lease_s

        def work(connection: sqlite3.Connection) -> bool:
            check_held(connection, lease)
            connection.execute(
                "UPDATE jobs SET leased_until = ? WHERE kind = ? AND id = ?",
                (time.time() + self._lease_s, lease.kind, lease.id),
            )
            row = connection.execute(
                "SELECT cancelled_at FROM jobs WHERE kind = ? AND id = ?", (lease.kind, lease.id)
            ).fetchone()
            return row[0] is not None

        while True:
            try:
                if await self._database.write(work):
                    lease.cancelled.set()
                expected_end = time.monotonic() + self._lease_s
            except LeaseLost:
                lease.lost.set()
                return
            except ApiError:  # a full disk, for instance: until the lease has run out, it may get better
                if time.monotonic() > expected_end:
                    lease.lost.set()
                    return
            await asyncio.sleep(self._poll_s)

    async def _give_back(self, lease: Lease) -> None:
        statement = "UPDATE jobs SET owner = NULL, leased_until = 0 WHERE kind = ? AND id = ? AND owner = ?"
        values = (lease.kind, lease.id, lease.owner)
        await self._database.write(lambda connection: connection.execute(statement, values))

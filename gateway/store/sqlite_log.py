"""The log in an SQLite database, which the gateway processes of a host share."""

import sqlite3
import time
from collections.abc import Callable, Sequence

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.database import Database
from pagewire.gateway.store.log import LEASE_S, Append, Bounds, Lease, LeaseLost, Standing, Tail

_OF_JOB = "kind = :kind AND id = :id"
_OF_OWNER = f"{_OF_JOB} AND owner = :owner"


def held(lease: Lease) -> Callable[[sqlite3.Connection], None]:
    """Returns a check for the transaction of a write, which raises LeaseLost if `lease` is lost.

    No process can claim the job before that transaction ends.
    """

    def check(connection: sqlite3.Connection) -> None:
        if connection.execute(f"SELECT 1 FROM jobs WHERE {_OF_OWNER}", _names(lease)).fetchone() is None:
            raise LeaseLost(lease.id)

    return check


class SqliteLog:
    """A `Log`. An entry survives the death of the process, but perhaps not that of the machine."""

    def __init__(self, database: Database, kind: str, bounds: Bounds | None, lease_s: float = LEASE_S) -> None:
        """bounds: None: jobs are few, and nothing is kept of one that has ended."""
        self._database = database
        self._kind = kind
        self._bounds = bounds
        self._lease_s = lease_s
        drops_unfinished = bounds is not None and bounds.drops_unfinished
        self._disposable = "leased_until <= :now" + ("" if drops_unfinished else " AND ended")
        self._ttl_s = 0.0 if bounds is None else bounds.ttl_s

    async def begin(self, id: str, about: bytes) -> bytes:
        def work(connection: sqlite3.Connection) -> bytes:
            now = time.time()
            self._drop_expired(connection, now)
            found = self._find(connection, id, now)
            if found is None:
                self._insert(connection, id, about, now)
            self._make_room(connection, now)
            return about if found is None else found

        return await self._database.write(work)

    def beginning(self, id: str, about: bytes) -> Callable[[sqlite3.Connection], None]:
        """Returns the work of adding a job, to be part of another write.

        That write raises ApiError if there is such a job, 503 if unfinished jobs leave no room for another.
        """

        def work(connection: sqlite3.Connection) -> None:
            now = time.time()
            self._drop_expired(connection, now)
            self._insert(connection, id, about, now)
            if not self._make_room(connection, now):
                raise ApiError(503, "too many responses wait in the background (--response-store-size); try again")

        return work

    async def find(self, id: str) -> bytes | None:
        return await self._database.read(lambda connection: self._find(connection, id, time.time()))

    async def claim(self, id: str | None = None) -> Lease | None:
        """id: None: any job that has no owner, the oldest first."""
        now = time.time()
        names = {"kind": self._kind, "id": id, "now": now, "until": now + self._lease_s}
        condition = "kind = :kind AND NOT ended AND leased_until <= :now" + ("" if id is None else " AND id = :id")

        def free(connection: sqlite3.Connection) -> tuple[str, str | None, int, float | None] | None:
            row: tuple[str, str | None, int, float | None] | None = connection.execute(
                f"SELECT id, owner, lost_leases, cancelled_at FROM jobs WHERE {condition} ORDER BY seq LIMIT 1", names
            ).fetchone()
            return row

        def work(connection: sqlite3.Connection) -> Lease | None:
            if (row := free(connection)) is None:
                return None
            id, earlier_owner, lost_leases, cancelled_at = row
            lease = Lease(self._kind, id, lost_leases + (earlier_owner is not None))
            if cancelled_at is not None:
                lease.cancelled.set()
            connection.execute(
                "UPDATE jobs SET owner = :owner, lost_leases = :lost_leases, leased_until = :until, touched_at = :now"
                f" WHERE {_OF_JOB}",
                names | _names(lease) | {"lost_leases": lease.lost_leases},
            )
            return lease

        # A process that only looks needs no lock.
        if await self._database.read(free) is None:
            return None
        return await self._database.write(work)

    async def append(self, entries: Sequence[Append]) -> list[bool]:
        now = time.time()

        def work(connection: sqlite3.Connection) -> list[bool]:
            appended = [self._append(connection, entry, now) for entry in entries]
            self._make_room(connection, now)  # as far as possible: what runs may grow to its end
            return appended

        return await self._database.write(work)

    async def read(self, id: str, first: int) -> Tail | None:
        names = {"kind": self._kind, "id": id, "now": time.time()}

        def work(connection: sqlite3.Connection) -> Tail | None:
            state = f"SELECT seq, ended, leased_until <= :now FROM jobs WHERE {_OF_JOB}"
            if (row := connection.execute(state, names).fetchone()) is None:
                return None
            values = connection.execute(
                "SELECT value FROM entries WHERE job = ? AND number >= ? ORDER BY number", (row[0], first)
            ).fetchall()
            return Tail([value for (value,) in values], ended=bool(row[1]), is_free=bool(row[2]))

        return await self._database.read(work)

    async def renew(self, leases: Sequence[Lease]) -> list[Standing]:
        def renewed(connection: sqlite3.Connection, lease: Lease) -> Standing:
            names = _names(lease) | {"until": time.time() + self._lease_s}
            if connection.execute(f"UPDATE jobs SET leased_until = :until WHERE {_OF_OWNER}", names).rowcount == 0:
                # This process was slow and not dead, as the next owner had to assume.
                connection.execute(f"UPDATE jobs SET lost_leases = max(lost_leases - 1, 0) WHERE {_OF_JOB}", names)
                return Standing.LOST
            return Standing.HELD if self._cancelled_at(connection, lease.id) is None else Standing.CANCELLED

        return await self._database.write(lambda connection: [renewed(connection, lease) for lease in leases])

    async def release(self, lease: Lease) -> None:
        statement = f"UPDATE jobs SET owner = NULL, leased_until = 0, touched_at = :now WHERE {_OF_OWNER}"
        names = _names(lease) | {"now": time.time()}
        await self._database.write(lambda connection: connection.execute(statement, names))

    async def end(self, lease: Lease) -> None:
        """Ends a job, of which only the entries are kept. Raises LeaseLost."""
        ended = "owner = NULL, leased_until = 0, ended = 1, bytes = bytes - length(about), about = x''"
        statement = f"UPDATE jobs SET {ended}, touched_at = :now WHERE {_OF_OWNER}"
        if self._bounds is None:
            statement = f"DELETE FROM jobs WHERE {_OF_OWNER}"
        names = _names(lease) | {"now": time.time()}
        if await self._database.write(lambda connection: connection.execute(statement, names).rowcount) == 0:
            raise LeaseLost(lease.id)

    async def cancel(self, id: str) -> bool:
        """Marks an unfinished job as cancelled. Returns whether there is one."""
        statement = f"UPDATE jobs SET cancelled_at = coalesce(cancelled_at, :now) WHERE {_OF_JOB} AND NOT ended"
        names = {"kind": self._kind, "id": id, "now": time.time()}
        return await self._database.write(lambda connection: connection.execute(statement, names).rowcount > 0)

    async def cancelled_at(self, id: str) -> float | None:
        """Returns the Unix time of the first cancel() of an unfinished job."""
        return await self._database.read(lambda connection: self._cancelled_at(connection, id))

    async def delete(self, id: str) -> None:
        """Deletes a job with its entries. An owner that still works on it has lost its lease."""
        await self._database.write(self.deletion(id))

    def deletion(self, id: str) -> Callable[[sqlite3.Connection], object]:
        """Returns the work of delete(), which can be part of another write."""
        return lambda connection: connection.execute(
            f"DELETE FROM jobs WHERE {_OF_JOB}", {"kind": self._kind, "id": id}
        )

    async def close(self) -> None:
        await self._database.close()

    def _insert(self, connection: sqlite3.Connection, id: str, about: bytes, now: float) -> None:
        connection.execute(
            "INSERT INTO jobs (kind, id, about, bytes, touched_at) VALUES (?, ?, ?, ?, ?)",
            (self._kind, id, about, len(about), now),
        )

    def _drop_expired(self, connection: sqlite3.Connection, now: float) -> None:
        connection.execute(
            f"DELETE FROM jobs WHERE kind = :kind AND touched_at <= :expired AND {self._disposable}",
            {"kind": self._kind, "now": now, "expired": now - self._ttl_s},
        )

    def _append(self, connection: sqlite3.Connection, entry: Append, now: float) -> bool:
        names = _names(entry.lease) | {"number": entry.number, "value": entry.value, "now": now}
        names["until"] = now + self._lease_s
        inserted = connection.execute(
            f"INSERT INTO entries SELECT seq, :number, :value FROM jobs WHERE {_OF_OWNER}", names
        )
        if not inserted.rowcount:
            return False
        changes = "leased_until = :until"
        if entry.is_last:
            changes = "owner = NULL, leased_until = 0, ended = 1, touched_at = :now"
        connection.execute(f"UPDATE jobs SET bytes = bytes + length(:value), {changes} WHERE {_OF_JOB}", names)
        return True

    def _find(self, connection: sqlite3.Connection, id: str, now: float) -> bytes | None:
        row = connection.execute(
            f"SELECT about FROM jobs WHERE {_OF_JOB} AND NOT (touched_at <= :expired AND {self._disposable})",
            {"kind": self._kind, "id": id, "now": now, "expired": now - self._ttl_s},
        ).fetchone()
        return row and row[0]

    def _cancelled_at(self, connection: sqlite3.Connection, id: str) -> float | None:
        statement = f"SELECT cancelled_at FROM jobs WHERE {_OF_JOB}"
        row = connection.execute(statement, {"kind": self._kind, "id": id}).fetchone()
        return row and row[0]

    def _make_room(self, connection: sqlite3.Connection, now: float) -> bool:
        """Deletes the oldest jobs until the rest is within the bounds. Returns whether it is."""
        if self._bounds is None:
            return True
        names = {"kind": self._kind, "now": now}
        conditions = [self._disposable, *(["1"] if self._bounds.drops_unfinished else ())]
        while True:
            total = connection.execute("SELECT count, bytes FROM totals WHERE collection = 'jobs/' || :kind", names)
            count, size = total.fetchone()
            if count <= self._bounds.count and size <= self._bounds.bytes:
                return True
            for condition in conditions:
                oldest = f"SELECT seq FROM jobs WHERE kind = :kind AND {condition} ORDER BY touched_at LIMIT 1"
                if (row := connection.execute(oldest, names).fetchone()) is not None:
                    connection.execute("DELETE FROM jobs WHERE seq = ?", row)
                    break
            else:
                return False


def _names(lease: Lease) -> dict[str, object]:
    """The named parameters of statements about a lease."""
    return {"kind": lease.kind, "id": lease.id, "owner": lease.owner}

"""The log in an SQLite database, which the gateway processes of a host share."""

import sqlite3
import time
from collections.abc import Callable, Sequence

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.database import Database, OnDatabase, reading, writing
from pagewire.gateway.store.log import LEASE_S, Append, Bounds, Lease, LeaseLost, Standing, Tail

_OF_JOB = "kind = :kind AND id = :id"
_OF_OWNER = f"{_OF_JOB} AND owner = :owner"


def held(lease: Lease) -> Callable[[sqlite3.Connection], None]:
    """Returns a check for the transaction of a write, which raises LeaseLost if `lease` is lost.

    No process can claim the job before that transaction ends.
    """

    def check(connection: sqlite3.Connection) -> None:
        values = (lease.kind, lease.id, lease.owner)
        if not connection.execute("SELECT 1 FROM jobs WHERE kind = ? AND id = ? AND owner = ?", values).fetchone():
            raise LeaseLost(lease.id)

    return check


class SqliteLog(OnDatabase):
    """A `Log`. An entry survives the death of the process, but perhaps not that of the machine."""

    def __init__(self, database: Database, kind: str, bounds: Bounds | None, lease_s: float = LEASE_S) -> None:
        """bounds: None if jobs are few and deleted when they end."""
        super().__init__(database)
        self._kind = kind
        self._bounds = bounds
        self.lease_s = lease_s
        drops_unfinished = bounds is not None and bounds.drops_unfinished
        self._disposable = "leased_until <= :now" + ("" if drops_unfinished else " AND ended")

    def add(self, connection: sqlite3.Connection, id: str, about: bytes) -> None:
        """Adds a job, as part of a write.

        Raises ApiError 503 if unfinished jobs leave no room, and sqlite3.IntegrityError if there is such a job.
        """
        expired = f"kind = :kind AND touched_at <= :expired AND {self._disposable}"
        self._execute(connection, f"DELETE FROM jobs WHERE {expired}")
        columns = "INSERT INTO jobs (kind, id, about, bytes, touched_at)"
        self._execute(connection, f"{columns} VALUES (:kind, :id, :about, length(:about), :now)", id=id, about=about)
        if not self._make_room(connection):
            raise ApiError(503, "too many responses wait in the background (--response-store-size); try again")

    def remove(self, connection: sqlite3.Connection, id: str) -> None:
        """Deletes a job with its entries, as part of a write. Its owner, if there is one, loses its lease."""
        self._execute(connection, f"DELETE FROM jobs WHERE {_OF_JOB}", id=id)

    @writing
    def begin(self, connection: sqlite3.Connection, id: str, about: bytes) -> bytes:
        if (found := self._find(connection, id)) is not None:
            return found
        self.add(connection, id, about)
        return about

    @reading
    def find(self, connection: sqlite3.Connection, id: str) -> bytes | None:
        return self._find(connection, id)

    async def claim(self, id: str | None = None) -> Lease | None:
        """Claims a job. id: None for the oldest job without an owner."""
        # The search needs no lock.
        is_free = await self.database.read(lambda connection: self._find_free(connection, id)) is not None
        return await self._claim(id) if is_free else None

    @writing
    def append(self, connection: sqlite3.Connection, entries: Sequence[Append]) -> list[bool]:
        appended = [self._append(connection, entry) for entry in entries]
        self._make_room(connection)  # as far as possible: unfinished jobs may grow to their end
        return appended

    @reading
    def read(self, connection: sqlite3.Connection, id: str, first: int) -> Tail | None:
        state = f"SELECT seq, ended, leased_until <= :now FROM jobs WHERE {_OF_JOB}"
        if (row := self._execute(connection, state, id=id).fetchone()) is None:
            return None
        values = connection.execute(
            "SELECT value FROM entries WHERE job = ? AND number >= ? ORDER BY number", (row[0], first)
        ).fetchall()
        return Tail([value for (value,) in values], ended=bool(row[1]), is_free=bool(row[2]))

    @writing
    def renew(self, connection: sqlite3.Connection, leases: Sequence[Lease]) -> list[Standing]:
        return [self._renew(connection, lease) for lease in leases]

    @writing
    def release(self, connection: sqlite3.Connection, lease: Lease) -> None:
        self._update(connection, "owner = NULL, leased_until = 0, touched_at = :now", lease)

    @writing
    def end(self, connection: sqlite3.Connection, lease: Lease) -> None:
        """Ends a job, of which only the entries are kept. Raises LeaseLost."""
        ended = "owner = NULL, leased_until = 0, ended = 1, touched_at = :now"
        if not self._update(connection, f"{ended}, bytes = bytes - length(about), about = x''", lease):
            raise LeaseLost(lease.id)
        if self._bounds is None:
            self.remove(connection, lease.id)

    @writing
    def cancel(self, connection: sqlite3.Connection, id: str) -> bool:
        """Marks an unfinished job as cancelled. Returns whether there is one."""
        statement = f"UPDATE jobs SET cancelled_at = coalesce(cancelled_at, :now) WHERE {_OF_JOB} AND NOT ended"
        return self._execute(connection, statement, id=id).rowcount > 0

    @reading
    def cancelled_at(self, connection: sqlite3.Connection, id: str) -> float | None:
        """Returns the Unix time of the first cancel() of a job."""
        return self._cancelled_at(connection, id)

    async def close(self) -> None:
        await self.database.close()

    def _execute(self, connection: sqlite3.Connection, statement: str, **names: object) -> sqlite3.Cursor:
        now = time.time()
        ttl_s = 0.0 if self._bounds is None else self._bounds.ttl_s
        times = {"now": now, "until": now + self.lease_s, "expired": now - ttl_s}
        return connection.execute(statement, {"kind": self._kind, **times, **names})

    def _update(self, connection: sqlite3.Connection, changes: str, lease: Lease, **names: object) -> bool:
        """Changes a job. Returns False if the lease is lost."""
        statement = f"UPDATE jobs SET {changes} WHERE {_OF_OWNER}"
        return self._execute(connection, statement, id=lease.id, owner=lease.owner, **names).rowcount > 0

    def _find(self, connection: sqlite3.Connection, id: str) -> bytes | None:
        condition = f"{_OF_JOB} AND NOT (touched_at <= :expired AND {self._disposable})"
        row = self._execute(connection, f"SELECT about FROM jobs WHERE {condition}", id=id).fetchone()
        return row and row[0]

    def _find_free(self, connection: sqlite3.Connection, id: str | None) -> tuple[str, str | None, int] | None:
        """Returns id, earlier owner and lost leases of a job that can be claimed."""
        condition = "kind = :kind AND NOT ended AND leased_until <= :now" + ("" if id is None else " AND id = :id")
        statement = f"SELECT id, owner, lost_leases FROM jobs WHERE {condition} ORDER BY seq LIMIT 1"
        row: tuple[str, str | None, int] | None = self._execute(connection, statement, id=id).fetchone()
        return row

    @writing
    def _claim(self, connection: sqlite3.Connection, id: str | None) -> Lease | None:
        if (row := self._find_free(connection, id)) is None:
            return None
        id, earlier_owner, lost_leases = row
        lease = Lease(self._kind, id, lost_leases + (earlier_owner is not None))
        if self._cancelled_at(connection, id) is not None:
            lease.cancelled.set()
        changes = "owner = :owner, lost_leases = :lost_leases, leased_until = :until, touched_at = :now"
        statement = f"UPDATE jobs SET {changes} WHERE {_OF_JOB}"
        self._execute(connection, statement, id=id, owner=lease.owner, lost_leases=lease.lost_leases)
        return lease

    def _append(self, connection: sqlite3.Connection, entry: Append) -> bool:
        changes = "leased_until = :until"
        if entry.is_last:
            changes = "owner = NULL, leased_until = 0, ended = 1, touched_at = :now"
        if not self._update(connection, f"bytes = bytes + :size, {changes}", entry.lease, size=len(entry.value)):
            return False
        inserted = f"INSERT INTO entries SELECT seq, :number, :value FROM jobs WHERE {_OF_JOB}"
        self._execute(connection, inserted, id=entry.lease.id, number=entry.number, value=entry.value)
        return True

    def _renew(self, connection: sqlite3.Connection, lease: Lease) -> Standing:
        if not self._update(connection, "leased_until = :until", lease):
            # This process was only slow; the next owner had to assume that it was dead.
            statement = f"UPDATE jobs SET lost_leases = max(lost_leases - 1, 0) WHERE {_OF_JOB}"
            self._execute(connection, statement, id=lease.id)
            return Standing.LOST
        return Standing.HELD if self._cancelled_at(connection, lease.id) is None else Standing.CANCELLED

    def _cancelled_at(self, connection: sqlite3.Connection, id: str) -> float | None:
        row = self._execute(connection, f"SELECT cancelled_at FROM jobs WHERE {_OF_JOB}", id=id).fetchone()
        return row and row[0]

    def _make_room(self, connection: sqlite3.Connection) -> bool:
        """Deletes the oldest jobs until the rest is within the bounds. Returns whether it is."""
        if self._bounds is None:
            return True
        conditions = [self._disposable, *(["1"] if self._bounds.drops_unfinished else ())]
        while True:
            total = "SELECT count, bytes FROM totals WHERE collection = 'jobs/' || :kind"
            count, size = self._execute(connection, total).fetchone()
            if count <= self._bounds.count and size <= self._bounds.bytes:
                return True
            for condition in conditions:
                oldest = f"SELECT seq FROM jobs WHERE kind = :kind AND {condition} ORDER BY touched_at LIMIT 1"
                if (row := self._execute(connection, oldest).fetchone()) is not None:
                    connection.execute("DELETE FROM jobs WHERE seq = ?", row)
                    break
            else:
                return False

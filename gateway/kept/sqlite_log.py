"""The log in an SQLite database, which the gateway processes of a host share."""

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from pagewire.gateway.kept.log import LEASE_S, Append, Bounds, Tail
from pagewire.gateway.store import Database, Schema

_SCHEMA = Schema(
    version=1,
    tables=("generations", "entries", "total"),
    script="""
CREATE TABLE generations (
    id TEXT PRIMARY KEY,
    about BLOB NOT NULL,
    owner TEXT,
    leased_until REAL NOT NULL DEFAULT 0,
    ended INTEGER NOT NULL DEFAULT 0,
    bytes INTEGER NOT NULL,
    touched_at REAL NOT NULL
);
CREATE INDEX generations_by_age ON generations (touched_at);
CREATE TABLE entries (
    id TEXT NOT NULL,
    number INTEGER NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (id, number)
) WITHOUT ROWID;

CREATE TABLE total (count INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO total VALUES (0, 0);
CREATE TRIGGER generations_inserted AFTER INSERT ON generations BEGIN
    UPDATE total SET count = count + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER generations_grown AFTER UPDATE OF bytes ON generations BEGIN
    UPDATE total SET bytes = bytes + new.bytes - old.bytes;
END;
CREATE TRIGGER generations_deleted AFTER DELETE ON generations BEGIN
    UPDATE total SET count = count - 1, bytes = bytes - old.bytes;
    DELETE FROM entries WHERE id = old.id;
END;
""",
)


class SqliteLog:
    """A `Log`. What is appended survives the death of the process, not always that of the machine."""

    def __init__(self, path: Path, bounds: Bounds, lease_s: float = LEASE_S) -> None:
        """path: ":memory:" for a log of this process alone. Raises StartupError."""
        self._database = Database(path, _SCHEMA)
        self._bounds = bounds
        self._lease_s = lease_s

    async def begin(self, id: str, about: bytes) -> bytes:
        now = time.time()

        def work(connection: sqlite3.Connection) -> bytes:
            connection.execute(
                "DELETE FROM generations WHERE touched_at <= ? AND leased_until <= ?", (now - self._bounds.ttl_s, now)
            )
            connection.execute(
                "INSERT OR IGNORE INTO generations (id, about, bytes, touched_at) VALUES (?, ?, ?, ?)",
                (id, about, len(about), now),
            )
            kept = self._find(connection, id)
            self._make_room(connection, now)
            return kept or about

        return await self._database.write(work)

    async def find(self, id: str) -> bytes | None:
        return await self._database.read(lambda connection: self._find(connection, id))

    async def claim(self, id: str, owner: str) -> bool:
        now = time.time()
        statement = (
            "UPDATE generations SET owner = ?, leased_until = ?, touched_at = ?"
            " WHERE id = ? AND NOT ended AND leased_until <= ?"
        )
        values = (owner, now + self._lease_s, now, id, now)
        return await self._database.write(lambda connection: connection.execute(statement, values).rowcount > 0)

    async def append(self, entries: Sequence[Append]) -> list[bool]:
        now = time.time()

        def work(connection: sqlite3.Connection) -> list[bool]:
            appended = [self._append(connection, entry, now) for entry in entries]
            self._make_room(connection, now)
            return appended

        return await self._database.write(work)

    async def read(self, id: str, first: int) -> Tail | None:
        def work(connection: sqlite3.Connection) -> Tail | None:
            state = "SELECT ended, leased_until <= ? FROM generations WHERE id = ?"
            if (row := connection.execute(state, (time.time(), id)).fetchone()) is None:
                return None
            values = connection.execute(
                "SELECT value FROM entries WHERE id = ? AND number >= ? ORDER BY number", (id, first)
            ).fetchall()
            return Tail([value for (value,) in values], ended=bool(row[0]), is_free=bool(row[1]))

        return await self._database.read(work)

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        values = [(time.time() + self._lease_s, *lease) for lease in leases]
        statement = "UPDATE generations SET leased_until = ? WHERE id = ? AND owner = ?"
        await self._database.write(lambda connection: connection.executemany(statement, values))

    async def release(self, id: str, owner: str) -> None:
        statement = "UPDATE generations SET owner = NULL, leased_until = 0, touched_at = ? WHERE id = ? AND owner = ?"
        await self._database.write(lambda connection: connection.execute(statement, (time.time(), id, owner)))

    async def close(self) -> None:
        await self._database.close()

    def _append(self, connection: sqlite3.Connection, entry: Append, now: float) -> bool:
        size = len(entry.value)
        if entry.is_last:
            changes = "owner = NULL, leased_until = 0, ended = 1, touched_at = :now"
        else:
            changes = "leased_until = :until"
        updated = connection.execute(
            f"UPDATE generations SET bytes = bytes + :size, {changes} WHERE id = :id AND owner = :owner",
            {"size": size, "now": now, "until": now + self._lease_s, "id": entry.id, "owner": entry.owner},
        )
        if not updated.rowcount:
            return False
        connection.execute("INSERT INTO entries VALUES (?, ?, ?)", (entry.id, entry.number, entry.value))
        return True

    def _find(self, connection: sqlite3.Connection, id: str) -> bytes | None:
        expired = time.time() - self._bounds.ttl_s
        row = connection.execute(
            "SELECT about FROM generations WHERE id = ? AND (touched_at > ? OR leased_until > ?)",
            (id, expired, time.time()),
        ).fetchone()
        return row and row[0]

    def _make_room(self, connection: sqlite3.Connection, now: float) -> None:
        while True:
            count, size = connection.execute("SELECT count, bytes FROM total").fetchone()
            if count <= self._bounds.count and size <= self._bounds.bytes:
                return
            oldest = "SELECT id FROM generations WHERE leased_until <= ? ORDER BY touched_at LIMIT 1"
            row = connection.execute(oldest, (now,)).fetchone() or connection.execute(oldest, (now * 2,)).fetchone()
            connection.execute("DELETE FROM generations WHERE id = ?", row)

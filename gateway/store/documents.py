"""Documents: values by id, in collections."""

import sqlite3
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.database import Database
from pagewire.gateway.store.jobs import Jobs, Lease, check_held


@dataclass(frozen=True)
class Document:
    id: str
    value: bytes
    created_at: float  # Unix time, seconds
    expires_at: float | None


@dataclass(frozen=True)
class Bound:
    """What a collection may hold; the oldest documents make room for a new one."""

    count: int
    bytes: int


class Documents:
    """One collection, in the order in which ids were first put. An expired document is as good as gone, and so is one
    of another owner; None stands for whoever it is.

    Every method raises ApiError if the store fails, 507 if the disk is full.
    """

    def __init__(self, database: Database, collection: str, bound: Bound | None) -> None:
        self._database = database
        self._collection = collection
        self._bound = bound

    async def put(
        self,
        id: str,
        value: bytes,
        *,
        owner: str = "",
        expires_at: float | None = None,
        lease: Lease | None = None,
        jobs: Jobs | None = None,
    ) -> None:
        """Adds, or replaces, which changes no owner. lease: written only while it is held. jobs: adds one of the same
        id, or neither.

        Raises LeaseLost, or ApiError 413 if the value alone is larger than the bound.
        """
        self._check_size(value)
        now = time.time()

        def work(connection: sqlite3.Connection) -> None:
            if lease is not None:
                check_held(connection, lease)
            connection.execute("DELETE FROM documents WHERE expires_at <= ?", (now,))
            connection.execute(
                "INSERT INTO documents (collection, id, value, created_at, expires_at, owner) VALUES (?, ?, ?, ?, ?, ?)"
                " ON CONFLICT (collection, id) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at",
                (self._collection, id, value, now, expires_at, owner),
            )
            if self._bound is not None:
                self._make_room(connection, self._bound)
            if jobs is not None:
                jobs.insert(connection, id)

        await self._database.write(work)
        if jobs is not None:
            jobs.wake()

    async def replace(self, id: str, value: bytes, *, expires_at: float | None = None, lease: Lease) -> bool:
        """Whether it is still there; what was deleted does not come back. Raises LeaseLost, or ApiError 413."""
        self._check_size(value)

        def work(connection: sqlite3.Connection) -> bool:
            check_held(connection, lease)
            if self._get(connection, id) is None:
                return False
            connection.execute(
                "UPDATE documents SET value = ?, expires_at = ? WHERE collection = ? AND id = ?",
                (value, expires_at, self._collection, id),
            )
            if self._bound is not None:
                self._make_room(connection, self._bound)
            return True

        return await self._database.write(work)

    async def get(self, id: str, owner: str | None = None) -> Document | None:
        return await self._database.read(lambda connection: self._get(connection, id, owner))

    async def delete(self, id: str, owner: str | None = None) -> bool:
        """Whether it was there."""

        def work(connection: sqlite3.Connection) -> bool:
            if self._get(connection, id, owner) is None:
                return False
            connection.execute("DELETE FROM documents WHERE collection = ? AND id = ?", (self._collection, id))
            return True

        return await self._database.write(work)

    async def delete_all(self, prefix: str) -> None:
        """Those whose ids begin like this."""
        statement = "DELETE FROM documents WHERE collection = ? AND id >= ? AND id < ?"
        values = (self._collection, prefix, prefix + chr(sys.maxunicode))
        await self._database.write(lambda connection: connection.execute(statement, values))

    async def list(
        self,
        owner: str | None = None,
        *,
        after: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Sequence[Document] | None:
        """after: the id that the page before ended with; None is returned if there is no such document (any more)."""
        comes_after, order = ("<", "DESC") if newest_first else (">", "ASC")

        def work(connection: sqlite3.Connection) -> Sequence[Document] | None:
            whose, values = "collection = ? AND owner = coalesce(?, owner)", (self._collection, owner)
            condition = f"{whose} AND (expires_at IS NULL OR expires_at > ?)"
            if after is not None:
                place = f"SELECT seq FROM documents WHERE {whose} AND id = ?"
                found = connection.execute(place, (*values, after)).fetchone()
                if found is None:
                    return None
                condition += f" AND seq {comes_after} {found[0]}"
            rows = connection.execute(
                f"SELECT id, value, created_at, expires_at FROM documents WHERE {condition}"
                f" ORDER BY seq {order} LIMIT ?",
                (*values, time.time(), -1 if limit is None else limit),
            )
            return [Document(*row) for row in rows]

        return await self._database.read(work)

    async def total(self) -> tuple[int, int]:
        """(documents, bytes), those that have expired but were not removed yet included."""
        statement = "SELECT count, bytes FROM totals WHERE collection = ?"
        row = await self._database.read(
            lambda connection: connection.execute(statement, (self._collection,)).fetchone()
        )
        return row or (0, 0)

    def _get(self, connection: sqlite3.Connection, id: str, owner: str | None = None) -> Document | None:
        row = connection.execute(
            "SELECT id, value, created_at, expires_at FROM documents"
            " WHERE collection = ? AND id = ? AND owner = coalesce(?, owner)"
            " AND (expires_at IS NULL OR expires_at > ?)",
            (self._collection, id, owner, time.time()),
        ).fetchone()
        return row and Document(*row)

    def _check_size(self, value: bytes) -> None:
        if self._bound is not None and len(value) > self._bound.bytes:
            raise ApiError(413, f"{len(value)} bytes are more than the {self._bound.bytes} that may be stored")

    def _make_room(self, connection: sqlite3.Connection, bound: Bound) -> None:
        totals = "SELECT count, bytes FROM totals WHERE collection = ?"
        oldest = "SELECT seq FROM documents WHERE collection = ? ORDER BY seq LIMIT 1"
        while True:
            count, size = connection.execute(totals, (self._collection,)).fetchone()
            if count <= bound.count and size <= bound.bytes:
                return
            connection.execute(f"DELETE FROM documents WHERE seq = ({oldest})", (self._collection,))

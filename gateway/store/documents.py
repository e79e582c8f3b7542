"""Documents: values by id, in collections."""

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.database import Database, OnDatabase, reading, writing

# Work that is part of a transaction.
Work = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True)
class Document:
    id: str
    value: bytes
    created_at: float  # Unix time, seconds
    expires_at: float | None


@dataclass(frozen=True)
class Bound:
    """The limits of a collection; the oldest documents make room for a new one."""

    count: int
    bytes: int


class Documents(OnDatabase):
    """One collection, in the order in which ids were first put.

    A document that has expired, or belongs to another owner, is not found. The owner None stands for all owners.

    Every method raises ApiError if the store fails, 507 if the disk is full.
    """

    def __init__(self, database: Database, collection: str, bound: Bound | None) -> None:
        super().__init__(database)
        self._collection = collection
        self._bound = bound

    @writing
    def put(
        self,
        connection: sqlite3.Connection,
        id: str,
        value: bytes,
        *,
        owner: str = "",
        expires_at: float | None = None,
        first: Work | None = None,
        adds: bool = True,
    ) -> bool:
        """Adds or replaces a document; a replaced one keeps its owner. Returns whether it did.

        first: work to do first in the same transaction; if it raises, nothing is written.
        adds: False to only replace: a deleted document stays deleted.

        Raises the errors of `first`, and ApiError 413 if the value alone is larger than the bound.
        """
        if self._bound is not None and len(value) > self._bound.bytes:
            raise ApiError(413, f"{len(value)} bytes are more than the {self._bound.bytes} that can be stored")
        if first is not None:
            first(connection)
        if not adds and self._get(connection, id) is None:
            return False
        now = time.time()
        connection.execute("DELETE FROM documents WHERE expires_at <= ?", (now,))
        connection.execute(
            "INSERT INTO documents (collection, id, value, created_at, expires_at, owner) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (collection, id) DO UPDATE SET value = excluded.value, expires_at = excluded.expires_at",
            (self._collection, id, value, now, expires_at, owner),
        )
        if self._bound is not None:
            self._make_room(connection, self._bound)
        return True

    @reading
    def get(self, connection: sqlite3.Connection, id: str, owner: str | None = None) -> Document | None:
        return self._get(connection, id, owner)

    @writing
    def delete(
        self, connection: sqlite3.Connection, id: str, owner: str | None = None, *, first: Work | None = None
    ) -> bool:
        """Deletes a document. Returns whether it existed. first: work of the same transaction, if it did."""
        if self._get(connection, id, owner) is None:
            return False
        if first is not None:
            first(connection)
        connection.execute("DELETE FROM documents WHERE collection = ? AND id = ?", (self._collection, id))
        return True

    @reading
    def list(
        self,
        connection: sqlite3.Connection,
        owner: str | None = None,
        *,
        after: str | None = None,
        limit: int | None = None,
        newest_first: bool = False,
    ) -> Sequence[Document] | None:
        """Returns a page of documents, or None if `after`, the last id of the previous page, is gone."""
        comes_after, order = ("<", "DESC") if newest_first else (">", "ASC")
        of_owner, values = "collection = ? AND owner = coalesce(?, owner)", (self._collection, owner)
        condition = f"{of_owner} AND (expires_at IS NULL OR expires_at > ?)"
        if after is not None:
            position = f"SELECT seq FROM documents WHERE {of_owner} AND id = ?"
            found = connection.execute(position, (*values, after)).fetchone()
            if found is None:
                return None
            condition += f" AND seq {comes_after} {found[0]}"
        rows = connection.execute(
            f"SELECT id, value, created_at, expires_at FROM documents WHERE {condition} ORDER BY seq {order} LIMIT ?",
            (*values, time.time(), -1 if limit is None else limit),
        )
        return [Document(*row) for row in rows]

    @reading
    def total(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Returns the number of documents and of their bytes, including expired ones that are not deleted yet."""
        statement = "SELECT count, bytes FROM totals WHERE collection = ?"
        return connection.execute(statement, (self._collection,)).fetchone() or (0, 0)

    def _get(self, connection: sqlite3.Connection, id: str, owner: str | None = None) -> Document | None:
        row = connection.execute(
            "SELECT id, value, created_at, expires_at FROM documents"
            " WHERE collection = ? AND id = ? AND owner = coalesce(?, owner)"
            " AND (expires_at IS NULL OR expires_at > ?)",
            (self._collection, id, owner, time.time()),
        ).fetchone()
        return row and Document(*row)

    def _make_room(self, connection: sqlite3.Connection, bound: Bound) -> None:
        totals = "SELECT count, bytes FROM totals WHERE collection = ?"
        oldest = "SELECT seq FROM documents WHERE collection = ? ORDER BY seq LIMIT 1"
        while True:
            count, size = connection.execute(totals, (self._collection,)).fetchone()
            if count <= bound.count and size <= bound.bytes:
                return
            connection.execute(f"DELETE FROM documents WHERE seq = ({oldest})", (self._collection,))

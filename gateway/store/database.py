"""An SQLite database in a thread of its own, open to several processes of one host."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pagewire.errors import StartupError
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.failure import storage_failure

BUSY_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Schema:
    """The tables of a database, and the statements that make them."""

    version: int
    tables: tuple[str, ...]
    script: str
    upgrades: tuple[str, ...] = ()  # from each version, beginning with 1, to the next


STORE = Schema(
    version=2,
    upgrades=("ALTER TABLE documents ADD COLUMN owner TEXT NOT NULL DEFAULT '';",),
    tables=("documents", "totals", "jobs"),
    script="""
CREATE TABLE documents (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    collection TEXT NOT NULL,
    id TEXT NOT NULL,
    value BLOB NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    owner TEXT NOT NULL DEFAULT '',
    UNIQUE (collection, id)
);
CREATE INDEX documents_in_order ON documents (collection, seq);
CREATE INDEX documents_that_expire ON documents (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE totals (collection TEXT PRIMARY KEY, count INTEGER NOT NULL, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER documents_inserted AFTER INSERT ON documents BEGIN
    INSERT INTO totals VALUES (new.collection, 1, length(new.value))
    ON CONFLICT DO UPDATE SET count = count + 1, bytes = bytes + length(new.value);
END;
CREATE TRIGGER documents_updated AFTER UPDATE OF value ON documents BEGIN
    UPDATE totals SET bytes = bytes + length(new.value) - length(old.value) WHERE collection = new.collection;
END;
CREATE TRIGGER documents_deleted AFTER DELETE ON documents BEGIN
    UPDATE totals SET count = count - 1, bytes = bytes - length(old.value) WHERE collection = old.collection;
    DELETE FROM totals WHERE collection = old.collection AND count = 0;
END;

CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    owner TEXT,
    leased_until REAL NOT NULL DEFAULT 0,
    lost_leases INTEGER NOT NULL DEFAULT 0,
    cancelled_at REAL,
    UNIQUE (kind, id)
);
""",
)

Result = TypeVar("Result")


class Database:
    """One connection. What its methods are given runs in its thread, in one transaction each."""

    def __init__(self, path: Path, schema: Schema = STORE) -> None:
        """Raises StartupError naming the path if it is damaged, cannot be written, or has another schema."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            self._connection = _open(path, schema)
        except sqlite3.Error as error:
            raise StartupError(
                f"--data-dir {path.parent}: {path.name} cannot be used ({error}): make the directory writable, move a"
                " damaged one away, or name another with --data-dir"
            ) from error

    async def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Raises ApiError."""
        return await self._run("BEGIN", work)

    async def write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Committed when it returns; undone if `work` raises. Raises ApiError, 507 if the disk is full."""
        return await self._run("BEGIN IMMEDIATE", work)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()

    async def _run(self, begin: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, begin, work)

    def _transaction(self, begin: str, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            self._connection.execute(begin)
            try:
                result = work(self._connection)
                self._connection.execute("COMMIT")
            finally:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            return result
        except sqlite3.Error as error:
            raise self._explain(error) from error

    def _explain(self, error: sqlite3.Error) -> ApiError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_BUSY:
            return ApiError(503, "the gateway's data directory is busy; try again")
        return storage_failure(self._path.parent, error, is_full=code == sqlite3.SQLITE_FULL)


def _open(path: Path, schema: Schema) -> sqlite3.Connection:
    """Raises sqlite3.Error, and StartupError for another schema."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        # A process that dies loses nothing that was committed; a machine that does, perhaps the last moments.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")  # processes that start together make one schema
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in _statements(schema.script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {schema.version}")
        while 0 < version <= len(schema.upgrades):
            connection.execute(schema.upgrades[version - 1])
            version += 1
            connection.execute(f"PRAGMA user_version = {version}")
        if version not in (0, schema.version):
            raise StartupError(
                f"--data-dir {path.parent}: another version of Pagewire made it (schema {version}, this one's is"
                f" {schema.version}): use that version, or name another directory with --data-dir"
            )
        for table in schema.tables:  # reads a page of each
            connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchall()
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _statements(script: str) -> list[str]:
    """executescript() would commit first."""
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements

"""An SQLite database with its own thread, open to several processes of one host."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from pagewire.errors import StartupError
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.failure import storage_failure

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 10.0

TABLES = ("documents", "totals", "jobs", "entries")
# Each script upgrades the schema to the next version; the first makes version 1 of an empty database.
SCRIPTS = (
    """
CREATE TABLE documents (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    collection TEXT NOT NULL,
    id TEXT NOT NULL,
    value BLOB NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
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
    "ALTER TABLE documents ADD COLUMN owner TEXT NOT NULL DEFAULT '';",
    """
ALTER TABLE jobs ADD COLUMN about BLOB NOT NULL DEFAULT x'';
ALTER TABLE jobs ADD COLUMN ended INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN touched_at REAL NOT NULL DEFAULT 0;
CREATE INDEX jobs_by_age ON jobs (kind, touched_at);
CREATE INDEX unfinished_jobs ON jobs (kind, seq) WHERE NOT ended;
CREATE TABLE entries (
    job INTEGER NOT NULL,
    number INTEGER NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;

INSERT INTO totals SELECT 'jobs/' || kind, count(*), 0 FROM jobs GROUP BY kind;
CREATE TRIGGER jobs_inserted AFTER INSERT ON jobs BEGIN
    INSERT INTO totals VALUES ('jobs/' || new.kind, 1, new.bytes)
    ON CONFLICT DO UPDATE SET count = count + 1, bytes = bytes + new.bytes;
END;
CREATE TRIGGER jobs_grown AFTER UPDATE OF bytes ON jobs BEGIN
    UPDATE totals SET bytes = bytes + new.bytes - old.bytes WHERE collection = 'jobs/' || new.kind;
END;
CREATE TRIGGER jobs_deleted AFTER DELETE ON jobs BEGIN
    UPDATE totals SET count = count - 1, bytes = bytes - old.bytes WHERE collection = 'jobs/' || old.kind;
    DELETE FROM entries WHERE job = old.seq;
END;

UPDATE jobs SET about = coalesce(
    (SELECT value FROM documents WHERE collection = 'response_output' AND documents.id = jobs.id || '/request'), x''
);
UPDATE jobs SET bytes = length(about);
DELETE FROM documents WHERE collection = 'response_output';
""",
)

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Database:
    """One connection. Each read() or write() runs its work in one transaction, in the thread of the database."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError naming the path if it is damaged, cannot be written, or has an unknown schema."""
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        try:
            self._connection = _open(path)
        except sqlite3.Error as error:
            raise StartupError(
                f"--data-dir {path.parent}: {path.name} cannot be used ({error}): make the directory writable, move a"
                " damaged one away, or name another with --data-dir"
            ) from error

    async def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Raises ApiError."""
        return await self._run("BEGIN", work)

    async def write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Returns after the commit; if `work` raises, nothing is written. Raises ApiError, 507 if the disk is full."""
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


class OnDatabase:
    """A class with methods that `reading` and `writing` run in transactions of its database."""

    def __init__(self, database: Database) -> None:
        self.database = database


Work = Callable[Concatenate[Any, sqlite3.Connection, Params], Result]
Method = Callable[Concatenate[Any, Params], Coroutine[Any, Any, Result]]


def reading(work: Work[Params, Result]) -> Method[Params, Result]:
    """Makes a method that is awaited without a connection and does its work in a transaction of `self.database`."""
    return _method(work, "read")


def writing(work: Work[Params, Result]) -> Method[Params, Result]:
    """The same as `reading`, for work that writes."""
    return _method(work, "write")


def _method(work: Work[Params, Result], kind: str) -> Method[Params, Result]:
    @wraps(work)
    async def method(self: OnDatabase, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        run = getattr(self.database, kind)
        result: Result = await run(lambda connection: work(self, connection, *args, **kwargs))
        return result

    return method


def _use_wal(connection: sqlite3.Connection) -> None:
    """Waits for others that open the same new file: SQLite itself does not, as two that wait here block each other.
    Raises sqlite3.Error."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _open(path: Path) -> sqlite3.Connection:
    """Raises sqlite3.Error, and StartupError for an unknown schema."""
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        # If a process dies, nothing that was committed is lost; if the machine dies, the last moments may be.
        _use_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")  # processes that start together make one schema
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > len(SCRIPTS):
            raise StartupError(
                f"--data-dir {path.parent}: another version of Pagewire made it (schema {version}, this version has"
                f" {len(SCRIPTS)}); use that version, or name another directory with --data-dir"
            )
        if 0 < version < len(SCRIPTS):
            logger.info(
                "--data-dir %s: upgrading schema %d to %d; the events of responses that ended in the background are"
                " dropped, and unfinished ones begin again",
                path.parent,
                version,
                len(SCRIPTS),
            )
        for script in SCRIPTS[version:]:
            for statement in _statements(script):
                connection.execute(statement)
        if version != len(SCRIPTS):
            connection.execute(f"PRAGMA user_version = {len(SCRIPTS)}")
        for table in TABLES:  # reads a page of each
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

"""The gateway's data directory."""

import logging
import os
from pathlib import Path

from pagewire.config.values.gateway import REDIS, check_generation_store
from pagewire.errors import StartupError
from pagewire.files.writing import unwritable
from pagewire.gateway.store.database import Database
from pagewire.gateway.store.documents import Bound, Documents
from pagewire.gateway.store.leases import POLL_S, Jobs
from pagewire.gateway.store.log import LEASE_S, Bounds, Log
from pagewire.gateway.store.sqlite_log import SqliteLog

logger = logging.getLogger(__name__)

DATABASE = "pagewire.db"


def data_directory(given: str | None, port: int) -> Path:
    """Returns the directory of the gateways of this REST port.

    That is --data-dir, else a directory for this port in the user's home, which other stacks of the user do not share.

    Raises StartupError if the user has no home.
    """
    if given is not None:
        return Path(given).expanduser().absolute()
    try:
        home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    except RuntimeError as error:
        raise StartupError(f"no directory for the gateway's data ({error}): name one with --data-dir") from error
    return Path(home) / "pagewire" / f"gateway-{port}"


class Store:
    """Documents and jobs in a directory, which any number of processes of one host may have open.

    Each feature that needs files has its own folder in `directory`.
    """

    def __init__(self, directory: Path) -> None:
        """Creates the directory if need be. Raises StartupError naming it."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(f"--data-dir {directory}", error) from error
        self.directory = directory
        self._database = Database(directory / DATABASE)

    def documents(self, collection: str, bound: Bound | None = None) -> Documents:
        return Documents(self._database, collection, bound)

    def jobs(
        self, kind: str, bounds: Bounds | None = None, *, lease_s: float = LEASE_S, poll_s: float = POLL_S
    ) -> Jobs:
        return Jobs(SqliteLog(self._database, kind, bounds, lease_s), poll_s)

    async def close(self) -> None:
        await self._database.close()


def open_log(choice: str, directory: Path, bounds: Bounds) -> Log:
    """Opens the log of generations that are kept for their clients. choice: --generation-store. Raises StartupError."""
    check_generation_store(choice)
    if choice.startswith(REDIS):
        from pagewire.gateway.store.redis_log import RedisLog  # deferred: most gateways have no Redis

        return RedisLog(choice, bounds)
    if old := list(directory.glob("generations.db*")):
        logger.info("%s/generations.db, with generations kept by an earlier version, is removed", directory)
        for path in old:
            path.unlink(missing_ok=True)
    # A separate connection, so that the entries of streams do not wait for documents.
    return SqliteLog(Database(Path(":memory:") if choice == "memory" else directory / DATABASE), "kept", bounds)

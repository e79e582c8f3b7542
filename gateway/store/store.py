"""The gateway's data directory."""

import os
from pathlib import Path

from pagewire.errors import StartupError
from pagewire.gateway.store.database import Database
from pagewire.gateway.store.documents import Bound, Documents
from pagewire.gateway.store.jobs import LEASE_S, POLL_S, Jobs


def data_directory(given: str | None, port: int) -> Path:
    """Where the gateways of this REST port keep their data: --data-dir, else a directory of the user for this port, so
    that several stacks of one user do not meet in it. Raises StartupError if the user has none."""
    if given is not None:
        return Path(given).expanduser().absolute()
    try:
        home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    except RuntimeError as error:
        raise StartupError(f"no directory for the gateway's data ({error}): name one with --data-dir") from error
    return Path(home) / "pagewire" / f"gateway-{port}"


class Store:
    """Documents and jobs in a directory. Any number of processes of one host may have it open.

    `directory` may also be used for files, each feature's in a folder of its own.
    """

    def __init__(self, directory: Path) -> None:
        """Creates the directory if need be. Raises StartupError naming it."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StartupError(
                f"--data-dir {directory}: cannot be created ({error.strerror or error}): name a directory that the"
                " gateway may write to"
            ) from error
        self.directory = directory
        self._database = Database(directory / "pagewire.db")

    def documents(self, collection: str, bound: Bound | None = None) -> Documents:
        return Documents(self._database, collection, bound)

    def jobs(self, kind: str, lease_s: float = LEASE_S, poll_s: float = POLL_S) -> Jobs:
        """lease_s: seconds that a job stays with an owner that is not heard of. poll_s: seconds between two looks."""
        return Jobs(self._database, kind, lease_s, poll_s)

    async def close(self) -> None:
        await self._database.close()

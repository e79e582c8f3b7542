"""One write to the log for all entries that came while the one before was under way."""

import asyncio

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.kept.log import Append, Log


class GroupCommit:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._waiting: list[tuple[Append, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def append(self, entry: Append) -> bool:
        """Returns when the entry is in the log; False: its owner does not write that generation any more.

        Raises ApiError.
        """
        appended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, appended))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="log of kept generations")
        return await appended

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                results = await self._log.append([entry for entry, _ in batch])
            except Exception as error:
                failure = error if isinstance(error, ApiError) else ApiError(500, f"the log failed: {error!r}")
                for _, appended in batch:
                    if not appended.done():
                        appended.set_exception(failure)
            else:
                for (_, appended), result in zip(batch, results, strict=True):
                    if not appended.done():
                        appended.set_result(result)

"""The jobs that this process owns: their leases are renewed together, and their entries are written together."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.store.log import Append, Lease, LeaseLost, Log, Standing
from pagewire.gateway.store.sqlite_log import SqliteLog

logger = logging.getLogger(__name__)

# Seconds between two searches for jobs without an owner.
POLL_S = 1.0


class Leases:
    """Leases of the jobs of one log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._held: dict[str, Lease] = {}  # by id of the job
        self._renewing: asyncio.Task[None] | None = None
        self._unwritten: list[tuple[Append, asyncio.Future[bool]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def claim(self, id: str) -> Lease | None:
        """Makes this process the owner of a job; None if it has ended or another process owns it. Raises ApiError."""
        return await self._log.claim(id)

    @asynccontextmanager
    async def hold(self, lease: Lease) -> AsyncIterator[None]:
        """Renews the lease during the block, and releases it afterwards, unless the job has ended.

        Raises LeaseLost in the middle of the block as soon as the lease is known to be lost.
        """
        task = asyncio.current_task()
        assert task is not None
        lease.interrupt, num_cancels = task.cancel, task.cancelling()
        if (earlier := self._held.get(lease.id)) is not None:
            self._lose(earlier)  # this process slept for longer than its lease, and has claimed the job anew
        self._held[lease.id] = lease
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name=f"leases of kind {lease.kind}")
        try:
            yield
        except asyncio.CancelledError:
            if lease.is_lost and task.uncancel() <= num_cancels:
                raise LeaseLost(lease.id) from None
            raise
        finally:
            lease.interrupt = lambda: None
            self._forget(lease)
            if not lease.is_lost and not lease.has_ended:
                with suppress(ApiError):  # the lease expires instead
                    await self._log.release(lease)

    async def append(self, lease: Lease, number: int, value: bytes, *, is_last: bool = False) -> None:
        """Returns when the entry is in the log. While one write is under way, entries gather for the next.

        Raises LeaseLost or ApiError.
        """
        if is_last:
            self._forget(lease)  # there is no lease to renew once the entry is written
        appended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unwritten.append((Append(lease, number, value, is_last), appended))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name=f"log of kind {lease.kind}")
        try:
            is_held = await asyncio.shield(appended)
        except asyncio.CancelledError:
            await asyncio.wait([appended])  # later readers of the log either find the entry or never will
            appended.exception()
            raise
        if not is_held:
            raise LeaseLost(lease.id)
        lease.has_ended = is_last

    def _forget(self, lease: Lease) -> None:
        if self._held.get(lease.id) is lease:
            del self._held[lease.id]
            if not self._held and self._renewing is not None:
                self._renewing.cancel()
                self._renewing = None

    def _lose(self, lease: Lease) -> None:
        self._forget(lease)
        lease.is_lost = True
        lease.interrupt()

    async def _write(self) -> None:
        while self._unwritten:
            batch, self._unwritten = self._unwritten, []
            try:
                results = await self._log.append([entry for entry, _ in batch])
            except Exception as error:
                failure = error if isinstance(error, ApiError) else ApiError(500, f"the log failed: {error!r}")
                for _, appended in batch:
                    appended.set_exception(failure)
            else:
                for (_, appended), result in zip(batch, results, strict=True):
                    appended.set_result(result)

    async def _renew(self) -> None:
        """Runs while this process owns jobs."""
        while True:
            await asyncio.sleep(self._log.lease_s / 4)
            leases = list(self._held.values())
            try:
                standings = await self._log.renew(leases)
            except ApiError as error:  # a full disk, for instance; nothing is written without a lease
                logger.warning("leases cannot be renewed, other processes may take the jobs: %s", error.message)
                continue
            for lease, standing in zip(leases, standings, strict=True):
                if self._held.get(lease.id) is not lease:
                    continue
                if standing is Standing.CANCELLED:
                    lease.cancelled.set()
                elif standing is Standing.LOST:
                    self._lose(lease)


class Jobs(Leases):
    """Jobs in the data directory, which processes claim in order of arrival."""

    def __init__(self, log: SqliteLog, poll_s: float = POLL_S) -> None:
        super().__init__(log)
        self.log = log
        self._poll_s = poll_s
        self._added = asyncio.Event()

    def wake(self) -> None:
        """Makes next() search immediately."""
        self._added.set()

    async def next(self) -> Lease:
        """Waits for a job without a living owner, and claims it. Raises ApiError."""
        while True:
            self._added.clear()
            if (lease := await self.log.claim()) is not None:
                return lease
            with suppress(TimeoutError):
                await asyncio.wait_for(self._added.wait(), self._poll_s)

    async def cancel(self, id: str) -> bool:
        """Marks the job as cancelled; its present or next owner ends it. Returns whether there is an unfinished job."""
        exists = await self.log.cancel(id)
        if exists and id in self._held:
            self._held[id].cancelled.set()
        return exists

    async def end(self, lease: Lease) -> None:
        """Ends the job; its entries stay until they expire or make room. Raises LeaseLost."""
        self._forget(lease)
        await self.log.end(lease)
        lease.has_ended = True

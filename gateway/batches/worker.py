"""Claims batches, new ones and those of processes that died, and runs them."""

import asyncio
import logging
from collections.abc import Collection
from functools import partial

from pagewire.batch.lines import Line
from pagewire.batch.results import Answer
from pagewire.gateway.batches.batches import Batches
from pagewire.gateway.batches.in_process import InProcess
from pagewire.gateway.batches.run import BatchRun
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.files.files import Files
from pagewire.gateway.models.models import Models
from pagewire.gateway.store import Lease, LeaseLost
from pagewire.wire import rpc
from pagewire.wire.tenants import Tenant

logger = logging.getLogger(__name__)

# Batches that one process runs at once. They share its limit of requests in flight.
MAX_BATCHES = 4
# The pause after an error of the store or the disk.
PAUSE_S = 10.0
SWEEP_S = 600.0


class BatchWorker:
    """Runs the batches that one gateway process claims, whichever process created them."""

    def __init__(self, batches: Batches, files: Files, models: Models, app: InProcess, concurrency: int) -> None:
        """concurrency: the most requests of batches that run at once."""
        self._batches = batches
        self._files = files
        self._models = models
        self._app = app
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._slots = asyncio.Semaphore(MAX_BATCHES)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Begins no further work; other processes, or the next one, continue the batches."""
        self._stopping.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            async with asyncio.TaskGroup() as group:
                while not self._stopping.is_set():
                    await self._slots.acquire()
                    group.create_task(self._work(await self._next()))
                await asyncio.Future()
        finally:
            await rpc.cancel([sweeping])

    async def _next(self) -> Lease:
        while True:
            try:
                return await self._batches.jobs.next()
            except ApiError as error:
                logger.error("batches cannot be run: %s", error)
            await asyncio.sleep(PAUSE_S)

    async def _work(self, lease: Lease) -> None:
        try:
            async with self._batches.jobs.hold(lease):
                await self._run(lease)
        except LeaseLost:
            logger.warning("batch %s is run by another process now", lease.id)
        except (ApiError, OSError) as error:
            logger.error("batch %s is interrupted: %s", lease.id, error)
            await asyncio.sleep(PAUSE_S)
        except Exception:
            logger.exception("batch %s is interrupted", lease.id)
            await asyncio.sleep(PAUSE_S)
        finally:
            self._slots.release()

    async def _run(self, lease: Lease) -> None:
        record = await self._batches.record(lease.id)
        post = partial(self._post, record.tenant)
        run = BatchRun(self._batches, self._files, self._list_models, post, lease, record)
        await run.run(self._room, self._concurrency, self._stopping)

    async def _list_models(self) -> Collection[str]:
        return await self._models.names()

    async def _post(self, tenant: Tenant, line: Line, request_id: str) -> Answer:
        return await self._app.post(line.url, line.body, request_id, tenant)

    async def _sweep(self) -> None:
        while True:
            try:
                await self._files.sweep()
            except (ApiError, OSError) as error:
                logger.error("expired files cannot be removed: %s", error)
            await asyncio.sleep(SWEEP_S)

"""The run of one batch, from the state of its record to its end."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import grpc

from pagewire.batch import lines
from pagewire.batch.lines import Line, LineError
from pagewire.batch.results import Answer, Results, ResultsInUse
from pagewire.batch.runner import Runner
from pagewire.gateway.batches.batches import Batches, Record
from pagewire.gateway.batches.bodies import (
    BatchError,
    BatchErrors,
    BatchInputTokensDetails,
    BatchOutputTokensDetails,
    BatchRequestCounts,
    BatchUsage,
)
from pagewire.gateway.batches.suspects import MAX_FAILURES, failures_file
from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.files.files import Files
from pagewire.gateway.store import Lease
from pagewire.wire import rpc
from pagewire.wire.model_names import not_served

logger = logging.getLogger(__name__)

# Seconds between two updates of the request counts that clients see.
REPORT_S = 1.0
# Seconds between two checks for models that are not served yet, or for files that the previous owner still has open.
LOOK_S = 1.0
# The most lines of a batch: all of their custom ids are in memory.
MAX_REQUESTS = 200_000
# The number of processes that may die while they run a batch before its remaining lines are taken for the cause. They
# are killed for other reasons, too; lines that end a process by themselves are found by suspects.py before.
MAX_DEATHS = 20
EXPIRED = "batch_expired", "the completion window ended before this request could be run"
POISONED = f"this request was refused, as the gateway failed {MAX_FAILURES} times while it handled it"
DEADLY = "gateway_died", f"the gateway died {MAX_DEATHS} times while it ran this batch"

ListModels = Callable[[], Awaitable[Collection[str]]]
Post = Callable[[Line, str], Awaitable[Answer]]


class BatchRun:
    """The steps of a batch, each of which can be repeated after a crash.

    The changes of a step are saved once it is complete. The answers of lines are in separate files, to which one
    process at a time can append.
    """

    def __init__(
        self, batches: Batches, files: Files, list_models: ListModels, post: Post, lease: Lease, record: Record
    ) -> None:
        """post: sends a line to this gateway, as a request of the given id."""
        self._batches = batches
        self._files = files
        self._list_models = list_models
        self._post = post
        self._lease = lease
        self._record = record
        self._batch = record.batch
        self._input = batches.working_file(record.batch.id)
        self._failures = batches.suspects.failures(record.batch.id)

    async def run(self, room: asyncio.Semaphore, concurrency: int, stopping: asyncio.Event) -> None:
        """Runs the batch to its end, or until `stopping`: then requests in flight end, and the next process continues.

        room: limits the requests in flight of all batches.

        Raises LeaseLost, ApiError or OSError.
        """
        batch = self._batch
        if batch.status == "validating":
            await self._validate_or_end(stopping)
        if batch.status == "in_progress":
            await self._run_lines(room, concurrency, stopping)
        if batch.status == "finalizing":
            await self._finalize()
        if batch.status in ("validating", "in_progress"):
            return
        for name in (batch.id, self._record.output_file_id, self._record.error_file_id):
            self._batches.working_file(name).unlink(missing_ok=True)
        failures_file(self._batches.folder, batch.id).unlink(missing_ok=True)
        await self._batches.jobs.end(self._lease)
        logger.info(
            "batch %s: %s; %d of %d requests failed%s",
            batch.id,
            batch.status,
            batch.request_counts.failed,
            batch.request_counts.total,
            "" if batch.errors is None else f", {len(batch.errors.data)} errors in its file",
        )

    async def _save(self) -> None:
        await self._batches.save(self._record, self._lease)

    async def _validate_or_end(self, stopping: asyncio.Event) -> None:
        validating = asyncio.create_task(self._validate())
        try:
            ending = await self._wait(validating, stopping)
        finally:
            await rpc.cancel([validating])
        if ending in ("cancelled", "expired"):
            await self._begin_finalizing(ending)

    async def _validate(self) -> None:
        batch = self._batch
        if self._lease.lost_leases >= MAX_DEATHS:
            message = f"the gateway died {MAX_DEATHS} times while it read the file"
            batch.errors = BatchErrors(data=[BatchError(code="gateway_died", line=None, message=message, param=None)])
            batch.status, batch.failed_at = "failed", int(time.time())
            await self._save()
            return
        checked = await asyncio.to_thread(lines.check, self._input, [batch.endpoint], MAX_REQUESTS)
        if checked.models and not checked.errors:
            lines.check_models(checked, await self._served())
        if checked.errors:
            batch.errors = BatchErrors(data=[_error(error) for error in checked.errors])
            batch.status, batch.failed_at = "failed", int(time.time())
        else:
            batch.request_counts.total = checked.num_requests
            batch.model = next(iter(checked.models), None)
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
        await self._save()

    async def _served(self) -> Collection[str]:
        """Returns the served models, once the tokenizer service answers."""
        while True:
            try:
                return await self._list_models()
            except (ApiError, grpc.aio.AioRpcError) as error:
                logger.debug("batch %s waits for the tokenizer service: %s", self._batch.id, error)
            await asyncio.sleep(LOOK_S)

    async def _run_lines(self, room: asyncio.Semaphore, concurrency: int, stopping: asyncio.Event) -> None:
        async with self._results() as results:
            runner = Runner(self._ask, results, room, away_timeout=0)
            running = asyncio.create_task(self._run_all(runner, results, concurrency))
            try:
                deadly = self._lease.lost_leases >= MAX_DEATHS
                ending = "deadly" if deadly else await self._wait(running, stopping)
                if ending == "stopped":
                    runner.stop()
                    if not await running:
                        return
                    ending = "completed"
            finally:
                await rpc.cancel([running])
            if ending == "expired":
                await self._fail_the_rest(results, *EXPIRED)
            elif ending == "deadly":
                await self._fail_the_rest(results, *DEADLY)
                ending = "completed"
        await self._end_lines(results, ending)

    async def _wait(self, running: asyncio.Task[Any], stopping: asyncio.Event) -> str:
        """Returns "completed", or the reason why the task has to end."""
        cancelled = asyncio.create_task(self._lease.cancelled.wait())
        stopped = asyncio.create_task(stopping.wait())
        left = max(0.0, self._batch.expires_at - time.time())
        try:
            done, _ = await asyncio.wait(
                {running, cancelled, stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await rpc.cancel([cancelled, stopped])
        if running in done:
            return "completed"
        return "cancelled" if cancelled in done else "stopped" if stopped in done else "expired"

    async def _run_all(self, runner: Runner, results: Results, concurrency: int) -> bool:
        reporting = asyncio.create_task(self._report(results))
        try:
            await self._wait_for_model()
            unread = lines.read(self._input, [self._batch.endpoint], results.done)
            return await runner.run(unread, concurrency)
        finally:
            await rpc.cancel([reporting])

    async def _wait_for_model(self) -> None:
        """Waits until the model is served: after a restart, the server may have another one."""
        model = self._batch.model
        if model is None or model in (served := await self._served()):
            return
        logger.warning("batch %s waits for its model: %s", self._batch.id, not_served(model, served))
        while model not in await self._served():  # noqa: ASYNC110 - the state of another service
            await asyncio.sleep(LOOK_S)

    async def _ask(self, line: Line) -> Answer:
        id = f"{self._batch.id}-{line.number}"
        failures = self._failures.get(line.number, 0)
        if failures >= MAX_FAILURES:
            return Answer(500, encode(ApiError(500, POISONED, code="gateway_died").body()), id)
        async with self._batches.suspects.handling(self._batch.id, line.number, is_suspect=failures > 0):
            return await self._post(line, id)

    async def _report(self, results: Results) -> None:
        while True:
            if self._note(results):
                await self._save()
            await asyncio.sleep(REPORT_S)

    def _note(self, results: Results) -> bool:
        """Updates the request counts. Returns whether they have changed."""
        counts = self._batch.request_counts
        noted = BatchRequestCounts(total=counts.total, completed=results.num_completed, failed=results.num_failed)
        self._batch.request_counts = noted
        return noted != counts

    async def _fail_the_rest(self, results: Results, code: str, message: str) -> None:
        async for line in lines.read(self._input, [self._batch.endpoint], frozenset(results.done)):
            await asyncio.to_thread(results.add_error, line, code, message)

    async def _end_lines(self, results: Results, ending: str) -> None:
        """Ends a batch after all of its lines. results: closed."""
        batch, record = self._batch, self._record
        self._note(results)
        if results.num_completed:
            batch.output_file_id = record.output_file_id
        if results.num_failed:
            batch.error_file_id = record.error_file_id
        usage = results.usage
        batch.usage = BatchUsage(
            input_tokens=usage.input_tokens,
            input_tokens_details=BatchInputTokensDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.output_tokens,
            output_tokens_details=BatchOutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.input_tokens + usage.output_tokens,
        )
        await self._begin_finalizing(ending)

    async def _begin_finalizing(self, ending: str) -> None:
        batch = self._batch
        self._record.ending = ending
        if (when := await self._batches.jobs.log.cancelled_at(batch.id)) is not None:
            batch.cancelling_at = int(when)
        batch.status, batch.finalizing_at = "finalizing", int(time.time())
        await self._save()

    async def _finalize(self) -> None:
        batch, expiry, owner = self._batch, self._record.output_expiry, self._record.tenant.name
        for id, what in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
            if id is not None:
                path = self._batches.working_file(id)
                await self._files.adopt(path, id, f"{batch.id}_{what}.jsonl", expiry, owner)
        now = int(time.time())
        if self._record.ending == "completed":
            batch.status, batch.completed_at = "completed", now
        elif self._record.ending == "expired":
            batch.status, batch.expired_at = "expired", now
        else:
            batch.status, batch.cancelled_at = "cancelled", now
        await self._save()

    @asynccontextmanager
    async def _results(self) -> AsyncIterator[Results]:
        record, file = self._record, self._batches.working_file
        while True:
            try:
                results = await asyncio.to_thread(Results, file(record.output_file_id), file(record.error_file_id))
                break
            except ResultsInUse as error:  # the previous owner has not noticed yet that its lease is lost
                logger.info("batch %s: %s", self._batch.id, error)
            await asyncio.sleep(LOOK_S)
        try:
            yield results
        finally:
            results.close()


def _error(error: LineError) -> BatchError:
    return BatchError(code=error.code, line=error.number, message=error.message, param=error.param)

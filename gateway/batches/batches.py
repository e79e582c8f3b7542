"""The batches in the store: clients create, list, retrieve and cancel them, and `worker.py` runs them."""

import asyncio
import os
import shutil
import time
import uuid
from pathlib import Path

import msgspec

from pagewire.gateway.batches.bodies import (
    Batch,
    BatchList,
    BatchQuery,
    BatchRequest,
    BatchRequestCounts,
    window_seconds,
)
from pagewire.gateway.batches.suspects import Suspects
from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.files.bodies import MAX_EXPIRY_S
from pagewire.gateway.files.files import Files, new_id
from pagewire.gateway.files.upload import storage_error
from pagewire.gateway.store import Document, Lease, Store, held
from pagewire.wire.tenants import NO_TENANT, Tenant, present

ENDED = ("completed", "failed", "expired", "cancelled")
# Seconds for which a batch is kept after its end.
KEPT_S = 90 * 86400.0


class Record(msgspec.Struct, kw_only=True):
    """A batch in the store, with fields that clients do not see."""

    batch: Batch
    # The files of its answers. Clients see an id only once its file exists.
    output_file_id: str
    error_file_id: str
    output_expiry: int  # seconds after their creation
    tenant: Tenant = NO_TENANT
    # The status of the batch after its lines have ended.
    ending: str = "completed"


class Batches:
    """The batches of all tenants; a tenant finds its own. Every method raises ApiError if the store fails."""

    def __init__(self, store: Store, files: Files) -> None:
        self._files = files
        self._documents = store.documents("batch")
        self.folder = store.directory / "batches"
        self.folder.mkdir(exist_ok=True)
        self.suspects = Suspects(self.folder)
        self.jobs = store.jobs("batch")

    def working_file(self, name: str) -> Path:
        """Returns a file of a running batch. name: the id of the batch (its input) or of a file of answers."""
        return self.folder / name

    async def create(self, request: BatchRequest) -> Batch:
        id, now = f"batch_{uuid.uuid4().hex}", int(time.time())
        try:
            file = await self._files.get(request.input_file_id)
        except ApiError as error:
            error.param = "input_file_id"
            raise
        if file.purpose != "batch":
            raise ApiError(400, f"the purpose of {file.id} is {file.purpose!r}, not 'batch'", param="input_file_id")
        batch = Batch(
            id=id,
            endpoint=request.endpoint,
            input_file_id=file.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + window_seconds(request.completion_window),
            request_counts=BatchRequestCounts(),
            metadata=request.metadata,
        )
        expiry = request.output_expires_after.seconds if request.output_expires_after else MAX_EXPIRY_S
        record = Record(
            batch=batch,
            output_file_id=new_id(),
            error_file_id=new_id(),
            output_expiry=expiry,
            tenant=present.get(),
        )
        # The batch has the input from now on, even if the file is deleted.
        await asyncio.to_thread(_link, self._files.path(file.id), self.working_file(id))
        try:
            value, owner = msgspec.json.encode(record), record.tenant.name
            await self._documents.put(
                id, value, owner=owner, first=lambda connection: self.jobs.log.add(connection, id, b"")
            )
            self.jobs.wake()
        except BaseException:
            self.working_file(id).unlink(missing_ok=True)
            raise
        return batch

    async def get(self, id: str) -> Batch:
        batch = (await self.record(id, present.get().name)).batch
        return await self._with_cancellation(batch)

    async def list(self, query: BatchQuery) -> BatchList:
        page = await self._documents.list(
            present.get().name, after=query.after, limit=query.limit + 1, newest_first=True
        )
        if page is None:
            raise _not_found(query.after or "", "after")
        data = [await self._with_cancellation(_decode(document).batch) for document in page[: query.limit]]
        return BatchList(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(page) > len(data),
        )

    async def cancel(self, id: str) -> Batch:
        """Marks a batch as cancelled; the process that runs it ends it."""
        batch = (await self.record(id, present.get().name)).batch
        if not await self.jobs.cancel(id):
            raise ApiError(409, f"{id} cannot be cancelled, as it is {batch.status}")
        return await self.get(id)

    async def record(self, id: str, owner: str | None = None) -> Record:
        """Returns a batch of this tenant, or of any tenant if owner is None."""
        document = await self._documents.get(id, owner)
        if document is None:
            raise _not_found(id, "batch_id")
        return _decode(document)

    async def save(self, record: Record, lease: Lease) -> None:
        """Raises LeaseLost if another process runs it now."""
        expires_at = time.time() + KEPT_S if record.batch.status in ENDED else None
        value = msgspec.json.encode(record)
        await self._documents.put(record.batch.id, value, expires_at=expires_at, first=held(lease))

    async def _with_cancellation(self, batch: Batch) -> Batch:
        """Shows a cancellation before the process that runs the batch has noticed it."""
        if batch.status in ("validating", "in_progress") and (when := await self.jobs.log.cancelled_at(batch.id)):
            return msgspec.structs.replace(batch, status="cancelling", cancelling_at=int(when))
        return batch


BATCHES = AppState[Batches]("batches")


def _link(source: Path, target: Path) -> None:
    """Gives the bytes of `source` another name. Raises ApiError."""
    try:
        try:
            os.link(source, target)
        except PermissionError:  # file systems without links
            shutil.copyfile(source, target)
    except OSError as error:
        raise storage_error(error, target) from error


def _decode(document: Document) -> Record:
    return msgspec.json.decode(document.value, type=Record)


def _not_found(id: str, param: str) -> ApiError:
    return ApiError(404, f"no batch {id!r}", param=param)

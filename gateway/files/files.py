"""Files in the gateway's data directory: their bytes in a folder, the rest in the store."""

import asyncio
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

import msgspec
from starlette.requests import Request

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.files.bodies import MAX_EXPIRY_S, File, FileList, FileQuery, Purpose
from pagewire.gateway.files.translate import upload_form
from pagewire.gateway.files.upload import save, storage_error
from pagewire.gateway.store import Document, Store
from pagewire.wire.tenants import present

# A file without a document has expired, was deleted, or is being uploaded; after this time, it is not an upload.
ORPHAN_S = 3600.0


class Files:
    """The files of all tenants; a tenant finds its own. Every method raises ApiError if the disk fails."""

    def __init__(self, store: Store, max_bytes: int, max_total_bytes: int) -> None:
        """max_bytes: limit of an upload. max_total_bytes: limit of all files; batches' answers count but always fit."""
        self._folder = store.directory / "files"
        self._folder.mkdir(exist_ok=True)
        self._documents = store.documents("file")
        self._max_bytes = max_bytes
        self._max_total_bytes = max_total_bytes

    def path(self, id: str) -> Path:
        """Returns the path of the bytes of a file."""
        return self._folder / id

    async def upload(self, request: Request) -> File:
        id = new_id()
        stream = request.stream()
        upload = await save(self.path(id), request.headers.get("content-type", ""), stream, self._max_bytes)
        try:
            await self._check_total()
            form = upload_form(upload.fields)
            expiry = form.expires_after.seconds if form.expires_after else MAX_EXPIRY_S
            assert upload.filename is not None
            return await self._add(id, Path(upload.filename).name, "batch", expiry, _owner())
        except BaseException:
            self.path(id).unlink(missing_ok=True)
            raise

    async def adopt(self, path: Path, id: str, filename: str, expiry: int, owner: str) -> File:
        """Moves the answers of a batch to the files of its owner. Can be repeated after a crash in the middle."""
        _move(path, self.path(id))
        return await self._add(id, filename, "batch_output", expiry, owner)

    async def get(self, id: str) -> File:
        document = await self._documents.get(id, _owner())
        if document is None:
            raise not_found(id)
        return _decode(document)

    async def list(self, query: FileQuery) -> FileList:
        newest_first, found, after = query.order == "desc", list[File](), query.after
        while len(found) <= query.limit:
            page = await self._documents.list(_owner(), after=after, limit=query.limit + 1, newest_first=newest_first)
            if page is None:
                raise not_found(query.after or "", param="after")
            if not page:
                break
            after = page[-1].id
            files = map(_decode, page)
            found += [file for file in files if query.purpose in (None, file.purpose)]
        shown = found[: query.limit]
        return FileList(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(found) > len(shown),
        )

    async def delete(self, id: str) -> None:
        if not await self._documents.delete(id, _owner()):
            raise not_found(id)
        self.path(id).unlink(missing_ok=True)

    async def sweep(self) -> None:
        """Removes the bytes of files that have expired, and leftovers of crashes."""
        before = time.time() - ORPHAN_S
        old = [entry.name for entry in os.scandir(self._folder) if entry.stat().st_mtime < before]
        for id in old:
            if await self._documents.get(id) is None:
                self.path(id).unlink(missing_ok=True)

    async def _check_total(self) -> None:
        """Checks the size of all files. Raises ApiError 413, as clients repeat a request that gets 507."""
        total = await asyncio.to_thread(_total_bytes, self._folder)
        if total > self._max_total_bytes:
            message = (
                f"all files together would take {total} bytes of {self._max_total_bytes}: delete some, "
                "or start the server with a larger --file-store-size"
            )
            raise ApiError(413, message, param="file")

    async def _add(self, id: str, filename: str, purpose: Purpose, expiry: int, owner: str) -> File:
        now = int(time.time())
        file = File(
            id=id,
            bytes=self.path(id).stat().st_size,
            created_at=now,
            expires_at=now + expiry,
            filename=filename,
            purpose=purpose,
        )
        await self._documents.put(id, msgspec.json.encode(file), owner=owner, expires_at=file.expires_at)
        return file


FILES = AppState[Files]("files")


def _owner() -> str:
    """Returns the tenant of the present request."""
    return present.get().name


def _total_bytes(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # deleted just now
            total += entry.stat().st_size
    return total


def _move(source: Path, target: Path) -> None:
    """Moves a file, unless it was moved before. Raises ApiError."""
    try:
        if source.exists():
            source.replace(target)
    except OSError as error:
        raise storage_error(error, target) from error


def new_id() -> str:
    return f"file-{uuid.uuid4().hex}"


def not_found(id: str, param: str = "file_id") -> ApiError:
    return ApiError(404, f"no file {id!r}: it never existed, was deleted or has expired", param=param)


def _decode(document: Document) -> File:
    return msgspec.json.decode(document.value, type=File)

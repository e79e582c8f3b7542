"""The routes for files."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, MalformedRangeHeader, RangeNotSatisfiable, Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.files.bodies import UPLOAD, DeletedFile, File, FileList, FileQuery
from pagewire.gateway.files.files import FILES, not_found

router = APIRouter(route_class=JsonRoute, tags=["files"])

_CONTENT: openapi.Responses = {200: {"description": "The bytes.", "content": {"application/octet-stream": {}}}}


class _Content(FileResponse):
    """A file. Its errors have the shape of all errors of this API."""

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        try:
            return super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader as error:
            raise HTTPException(400, f"Range: {http_range!r} is not a range of this file: {error.content}") from error
        except RangeNotSatisfiable as error:
            message = f"Range: {http_range!r} is outside of the file, which has {file_size} bytes"
            raise HTTPException(416, message, {"Content-Range": f"bytes */{file_size}"}) from error


@router.post("/v1/files", openapi_extra=UPLOAD)
async def create_file(request: Request) -> File:
    """Uploads the input of a batch, which is kept for 30 days or for `expires_after`."""
    return await FILES.of(request).upload(request)


@router.get("/v1/files")
async def list_files(request: Request, query: Annotated[FileQuery, Query()]) -> FileList:
    """Lists the files: uploads, and the answers of batches."""
    return await FILES.of(request).list(query)


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> File:
    """Returns the properties of a file."""
    return await FILES.of(request).get(file_id)


@router.get("/v1/files/{file_id}/content", responses=_CONTENT)
async def retrieve_file_content(request: Request, file_id: str) -> Response:
    """Returns the bytes of a file."""
    files = FILES.of(request)
    file = await files.get(file_id)
    try:
        stat_result = files.path(file.id).stat()
    except FileNotFoundError:  # deleted just now
        raise not_found(file.id) from None
    return _Content(
        files.path(file.id),
        media_type="application/octet-stream",
        filename=file.filename,
        stat_result=stat_result,
    )


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> DeletedFile:
    """Deletes a file. A batch that was created with it continues."""
    await FILES.of(request).delete(file_id)
    return DeletedFile(id=file_id)

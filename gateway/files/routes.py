"""The routes for files."""

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import FileResponse, Response

from pagewire.gateway import openapi
from pagewire.gateway.files.files import not_found
from pagewire.gateway.files.schema import UPLOAD, DeletedFile, File, FileList, FileQuery
from pagewire.gateway.gateway import gateway_of
from pagewire.gateway.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["files"])

_CONTENT: openapi.Responses = {200: {"description": "The bytes.", "content": {"application/octet-stream": {}}}}


@router.post("/v1/files", openapi_extra=UPLOAD)
async def create_file(request: Request) -> File:
    """Uploads the input of a batch. It is kept for 30 days, unless `expires_after` says otherwise."""
    return await gateway_of(request).files.upload(request)


@router.get("/v1/files")
async def list_files(request: Request, query: Annotated[FileQuery, Query()]) -> FileList:
    """The files that were uploaded and those that batches have answered with."""
    return await gateway_of(request).files.list(query)


@router.get("/v1/files/{file_id}")
async def retrieve_file(request: Request, file_id: str) -> File:
    """What is known of a file."""
    return await gateway_of(request).files.get(file_id)


@router.get("/v1/files/{file_id}/content", responses=_CONTENT)
async def retrieve_file_content(request: Request, file_id: str) -> Response:
    """The bytes of a file."""
    files = gateway_of(request).files
    file = await files.get(file_id)
    try:
        stat_result = files.path(file.id).stat()
    except FileNotFoundError:  # deleted just now
        raise not_found(file.id) from None
    return FileResponse(
        files.path(file.id),
        media_type="application/octet-stream",
        filename=file.filename,
        stat_result=stat_result,
    )


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> DeletedFile:
    """Deletes a file. A batch that was created with it goes on."""
    await gateway_of(request).files.delete(file_id)
    return DeletedFile(id=file_id)

"""The routes for batches."""

from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request
from starlette.routing import Match

from pagewire.batch.lines import ENDPOINTS
from pagewire.gateway.batches.batches import BATCHES
from pagewire.gateway.batches.bodies import Batch, BatchList, BatchQuery, BatchRequest
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["batches"])


@router.post("/v1/batches")
async def create_batch(request: Request, body: BatchRequest) -> Batch:
    """Answers the requests of an uploaded file in the background."""
    endpoints = _endpoints(request.app)
    if body.endpoint not in endpoints:
        message = f"endpoint: {body.endpoint!r} is not available to batches; use one of {', '.join(endpoints)}"
        raise ApiError(400, message, param="endpoint")
    return await BATCHES.of(request).create(body)


@router.get("/v1/batches")
async def list_batches(request: Request, query: Annotated[BatchQuery, Query()]) -> BatchList:
    """Lists all batches, the newest first."""
    return await BATCHES.of(request).list(query)


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(request: Request, batch_id: str) -> Batch:
    """Returns the state of a batch, and the files of its answers once it has ended."""
    return await BATCHES.of(request).get(batch_id)


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Batch:
    """Ends the batch. The answers until then are in its output file."""
    return await BATCHES.of(request).cancel(batch_id)


def _endpoints(app: FastAPI) -> list[str]:
    """Returns the endpoints of batches that this server has."""

    def has(path: str) -> bool:
        scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": []}
        return any(route.matches(scope)[0] is Match.FULL for route in app.routes)

    return [endpoint for endpoint in ENDPOINTS if has(endpoint)]

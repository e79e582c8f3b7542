"""GET /v1/status, and the same as a stream of events."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response, StreamingResponse

from pagewire.gateway.core import openapi
from pagewire.gateway.core.encoding import event
from pagewire.gateway.core.json_route import JsonRoute
from pagewire.gateway.core.middleware import SHUTDOWN, GracefulShutdown
from pagewire.gateway.operation.status.bodies import PageMap, Status
from pagewire.gateway.operation.status.source import STATUS, StatusSource

router = APIRouter(route_class=JsonRoute, tags=["operation"])

# Seconds between two events.
PERIOD_S = 1.0
# Who asks for one status gets what others have just asked for.
FRESH_S = 0.2

_EVENTS: openapi.Responses = {
    200: {"description": "An event about once a second.", "content": openapi.events_of((Status,), done=False)}
}


@router.get("/v1/status")
async def status(request: Request) -> Status:
    """How all services are, what the engine is doing and which KV blocks are in use; also while the line is not ready.

    Through gRPC: `pagewire.v1.AdminService/GetStatus` of any service, for it and those behind it.
    """
    return await STATUS.of(request).status(FRESH_S)


@router.get("/v1/status/stream", responses=_EVENTS)
async def status_stream(request: Request) -> Response:
    """The status about once a second, as server-sent events. A map of KV blocks is left out while it stays the same."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    events = _events(STATUS.of(request), SHUTDOWN.of(request))
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(source: StatusSource, shutdown: GracefulShutdown) -> AsyncIterator[bytes]:
    told: list[list[PageMap]] = []
    while not shutdown.begun:  # or it would wait for this stream's end
        latest = await source.status(PERIOD_S / 2)
        yield event(_without(latest, told))
        told = _maps(latest)
        await asyncio.sleep(PERIOD_S)


def _maps(status: Status) -> list[list[PageMap]]:
    return [[group.map for group in replica.groups if group.map is not UNSET] for replica in status.replicas]


def _without(status: Status, told: list[list[PageMap]]) -> Status:
    """Without the maps that are as they were told."""
    replicas = []
    for index, replica in enumerate(status.replicas):
        earlier = told[index] if index < len(told) else []
        groups = [
            msgspec.structs.replace(group, map=UNSET) if place < len(earlier) and group.map == earlier[place] else group
            for place, group in enumerate(replica.groups)
        ]
        replicas.append(msgspec.structs.replace(replica, groups=groups))
    return msgspec.structs.replace(status, replicas=replicas)

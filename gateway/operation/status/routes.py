"""GET /v1/status, and the status as a stream of events."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response, StreamingResponse

from pagewire.gateway.core import openapi
from pagewire.gateway.core.encoding import event
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.shutdown import SHUTDOWN, GracefulShutdown
from pagewire.gateway.operation.status.bodies import PageMap, Status
from pagewire.gateway.operation.status.source import STATUS, StatusSource

router = APIRouter(route_class=JsonRoute, tags=["operation"])

# Seconds between two events.
PERIOD_S = 1.0
# A single status may be this old, in seconds.
FRESH_S = 0.2

_EVENTS: openapi.Responses = {
    200: {"description": "An event about once a second.", "content": openapi.events_of((Status,), done=False)}
}


@router.get("/v1/status")
async def status(request: Request) -> Status:
    """Returns the state of all services, the load of the engine and a map of KV blocks, even while it is not ready.

    Through gRPC: `pagewire.v1.AdminService/GetStatus` of any service, for it and those behind it.
    """
    return await STATUS.of(request).status(FRESH_S)


@router.get("/v1/status/stream", responses=_EVENTS)
async def status_stream(request: Request) -> Response:
    """Streams the status about once a second, as server-sent events. An unchanged map of KV blocks is left out."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    events = _events(STATUS.of(request), SHUTDOWN.of(request))
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(source: StatusSource, shutdown: GracefulShutdown) -> AsyncIterator[bytes]:
    sent: list[list[PageMap]] = []
    while not shutdown.begun:  # a shutdown waits for the end of this stream
        latest = await source.status(PERIOD_S / 2)
        yield event(_without(latest, sent))
        sent = _maps(latest)
        await asyncio.sleep(PERIOD_S)


def _maps(status: Status) -> list[list[PageMap]]:
    return [[group.map for group in replica.groups if group.map is not UNSET] for replica in status.replicas]


def _without(status: Status, sent: list[list[PageMap]]) -> Status:
    """Returns the status without unchanged maps."""
    replicas = []
    for index, replica in enumerate(status.replicas):
        earlier = sent[index] if index < len(sent) else []
        groups = [
            msgspec.structs.replace(group, map=UNSET) if place < len(earlier) and group.map == earlier[place] else group
            for place, group in enumerate(replica.groups)
        ]
        replicas.append(msgspec.structs.replace(replica, groups=groups))
    return msgspec.structs.replace(status, replicas=replicas)

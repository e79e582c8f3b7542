"""Probes for supervisors and load balancers, on every port and without a key."""

from fastapi import APIRouter, Request
from msgspec import UNSET
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.operation.bodies import Health
from pagewire.gateway.operation.readiness import READINESS

router = APIRouter(route_class=JsonRoute, tags=["operation"])

_READY: openapi.Responses = {
    200: openapi.response(Health, "Ready; `reason` says if the model sleeps."),
    503: openapi.response(Health, "Not ready, for the `reason`."),
}


@router.get("/livez")
async def livez(request: Request) -> Health:
    """Reports that this process runs. Needs no key."""
    return Health(status="ok")


@router.get("/health", responses=_READY)
@router.get("/ready", responses=_READY)
@router.get("/ping", responses=_READY)
@router.post("/ping", responses=_READY)
@router.get("/readyz", responses=_READY)
async def ready(request: Request) -> Response:
    """Reports whether all services can serve a request. Needs no key."""
    if reason := await READINESS.of(request).why_not():
        return json_response(Health(status="unavailable", reason=reason), 503)
    return json_response(Health(status="ok", reason=await READINESS.of(request).note() or UNSET))

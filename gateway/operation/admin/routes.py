"""All routes for operators: those that tell, which any key opens, and those that change the service."""

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from pagewire.gateway.core.json_route import JsonRoute
from pagewire.gateway.operation.admin import weights
from pagewire.gateway.operation.exposition.source import METRICS
from pagewire.gateway.operation.status import routes as status_routes
from pagewire.wire import tenants

telling = APIRouter(route_class=JsonRoute, tags=["operation"])


@telling.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(request: Request) -> Response:
    """Prometheus metrics of all services, as OpenMetrics where the header Accept names it. Of what is counted by tenant
    a tenant gets its own."""
    accept = request.headers.get("accept", "")
    exposition = await METRICS.of(request).exposition(accept, tenants.caller_scope())
    return Response(exposition.content, media_type=exposition.content_type)


# Routers of what changes the service have AdminRoute as their route_class.
ROUTERS = (telling, status_routes.router, weights.router)

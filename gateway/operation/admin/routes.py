"""All routes for operators: those that report, for any key, and those that change the service."""

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.operation.admin import adapters, caches, models, sleep, weights
from pagewire.gateway.operation.exposition.source import METRICS
from pagewire.gateway.operation.status import routes as status_routes
from pagewire.wire import tenants

reporting = APIRouter(route_class=JsonRoute, tags=["operation"])


@reporting.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(request: Request) -> Response:
    """Returns Prometheus metrics of all services, as OpenMetrics if the header Accept names it. Metrics by tenant are
    those of the caller."""
    accept = request.headers.get("accept", "")
    exposition = await METRICS.of(request).exposition(accept, tenants.caller_scope())
    return Response(exposition.content, media_type=exposition.content_type)


# Routers with routes that change the service have AdminRoute as their route_class.
ROUTERS = (reporting, status_routes.router, weights.router, adapters.router, caches.router, sleep.router, models.router)

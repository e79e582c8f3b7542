"""The metrics of all services and of all gateways of a data directory, for one scrape."""

import asyncio

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.models.models import Models
from pagewire.gateway.operation.exposition.line_metrics import line_metrics
from pagewire.gateway.operation.exposition.merge import Exposition, expose
from pagewire.gateway.operation.siblings import Siblings
from pagewire.telemetry.tenant_metrics import of_tenant
from pagewire.v1.admin_pb2 import GetMetricsRequest, ServiceMetrics
from pagewire.wire.admin import Neighbour, each_once, metrics_behind

TIMEOUT_S = 4.0


class Metrics:
    """Asks every service and every gateway process for its metrics."""

    def __init__(self, models: Models, siblings: Siblings, *, with_vllm_names: bool) -> None:
        self._models = models
        self._siblings = siblings
        self._with_vllm_names = with_vllm_names

    async def exposition(self, accept: str = "", tenant: str | None = None) -> Exposition:
        """Returns the metrics of all processes that answer.

        Args:
            accept: the header of the scraper.
            tenant: metrics of other tenants are left out. None: all tenants.
        """
        await self._models.learn_names()
        own, behind = await asyncio.gather(
            self._siblings.metrics(), asyncio.gather(*map(_of_model, self._models.services()))
        )
        stack = [] if self._models.stack is None else [line_metrics(self._models.lines)]
        # The gateway serves all models: only one of them can be that of its own metrics.
        own_model = behind[0][0] if len(self._models.lines) == 1 else None
        found: list[tuple[str | None, list[ServiceMetrics]]] = [(own_model, own), (None, stack), *behind]
        by_model = [(model, of_tenant(services, tenant)) for model, services in found if services]
        # Parsing a few thousand lines takes longer than a token may wait.
        return await asyncio.to_thread(expose, by_model, accept, with_vllm_names=self._with_vllm_names)


async def _of_model(services: tuple[str, list[Neighbour]]) -> tuple[str | None, list[ServiceMetrics]]:
    """Returns the metrics of the services of a model, with its name."""
    model, neighbours = services
    found = await asyncio.gather(*(metrics_behind(one, GetMetricsRequest(), TIMEOUT_S) for one in neighbours))
    return model, each_once(found)


METRICS = AppState[Metrics]("metrics")

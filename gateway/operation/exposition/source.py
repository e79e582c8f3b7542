"""The metrics of all services and of all gateways of a data directory, for one scrape."""

import asyncio

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.operation.exposition.merge import Exposition, expose
from pagewire.gateway.operation.siblings import Siblings
from pagewire.telemetry.tenant_metrics import of_tenant
from pagewire.v1.admin_pb2 import GetMetricsRequest
from pagewire.wire.admin import each_once, metrics_behind

TIMEOUT_S = 4.0


class Metrics:
    """Asks every service and every gateway process for its metrics."""

    def __init__(self, tokenizer: TokenizerClient, siblings: Siblings, *, with_vllm_names: bool) -> None:
        self._tokenizer = tokenizer
        self._siblings = siblings
        self._with_vllm_names = with_vllm_names

    async def exposition(self, accept: str = "", tenant: str | None = None) -> Exposition:
        """Returns the metrics of all processes that answer.

        Args:
            accept: the header of the scraper.
            tenant: metrics of other tenants are left out. None: all tenants.
        """
        own, *behind = await asyncio.gather(
            self._siblings.metrics(),
            *(metrics_behind(one, GetMetricsRequest(), TIMEOUT_S) for one in self._tokenizer.neighbours()),
        )
        model = await self._tokenizer.known_model()
        services = of_tenant([*own, *each_once(behind)], tenant)
        # Parsing a few thousand lines takes longer than a token may wait.
        return await asyncio.to_thread(expose, services, accept, model, with_vllm_names=self._with_vllm_names)


METRICS = AppState[Metrics]("metrics")

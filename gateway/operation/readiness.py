"""Readiness: whether all services would serve a request now."""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.shutdown import GracefulShutdown
from pagewire.gateway.core.tokenizer_link import LINK_NAME, TokenizerLink
from pagewire.wire.streams import Peer

PROBE_TIMEOUT_S = 2.0


class Readiness:
    """Probes the tokenizer services, which report for the services behind them."""

    def __init__(self, link: TokenizerLink, shutdown: GracefulShutdown) -> None:
        self._link = link
        self._shutdown = shutdown

    async def why_not(self) -> str:
        """Returns why requests cannot be served; "" if they can."""
        if self._shutdown.announced:
            return "this gateway is shutting down"
        if not self._link.peers:
            return "no tokenizer service is known yet"
        reasons = await asyncio.gather(*map(_why_not, self._link.peers))
        return "" if "" in reasons else reasons[0]


READINESS = AppState[Readiness]("readiness")


async def _why_not(peer: Peer[Any, Any]) -> str:
    """The same as `Readiness.why_not` for one tokenizer service."""
    request = health_pb2.HealthCheckRequest(service=LINK_NAME)
    try:
        health = await health_pb2_grpc.HealthStub(peer.channel).Check(request, timeout=PROBE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return f"the tokenizer service does not answer: {error.code().name}: {error.details()}"
    if not peer.is_up:
        return "the stream to the tokenizer service is not up yet"
    if health.status != health_pb2.HealthCheckResponse.SERVING:
        return "the tokenizer service is up, but the services behind it are not ready: they are loading or restarting"
    return ""

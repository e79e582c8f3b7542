"""Readiness: whether all services would serve a request now."""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.shutdown import GracefulShutdown
from pagewire.gateway.core.tokenizer_link import LINK_NAME
from pagewire.gateway.models.line import ModelLine
from pagewire.gateway.models.models import Models
from pagewire.v1 import inference_pb2, inference_pb2_grpc, lines_pb2
from pagewire.v1.lines_pb2 import LineState
from pagewire.wire.streams import Peer

PROBE_TIMEOUT_S = 2.0
ASLEEP = "the model sleeps: requests wait until it is woken, or wake it"


class Readiness:
    """Probes the services of the default model, which report for those behind them."""

    def __init__(self, models: Models, shutdown: GracefulShutdown) -> None:
        self._models = models
        self._shutdown = shutdown

    async def why_not(self) -> str:
        """Returns why requests cannot be served; "" if they can, now or once the model is loaded for them."""
        if self._shutdown.announced:
            return "this gateway is shutting down"
        if not self._models.lines:
            return "no tokenizer service is known yet"
        line = self._models.lines[0]
        if line.told is not None and line.state != "ready":
            return _why_not_told(line.told)
        peers = line.client.link.peers
        if not peers:
            return "no tokenizer service is known yet"
        reasons = await asyncio.gather(*map(_why_not, peers))
        return "" if "" in reasons else reasons[0]

    async def note(self) -> str:
        """Returns what is worth knowing although requests are served; "" if there is nothing."""
        lines = self._models.lines
        if len(lines) == 1 and lines[0].told is None:
            return await _note(lines[0])
        states = {line.name: line.state for line in lines if line.state != "ready"}
        return ", ".join(f"{name} is {state}" for name, state in states.items())


def _why_not_told(told: lines_pb2.Line) -> str:
    """The same as `Readiness.why_not` for a line of a stack that does not serve now."""
    if not told.pinned:  # its next request loads it, which has to come here for that
        return ""
    if told.problem:
        return f"{told.name} could not be loaded: {told.problem}"
    if told.state != LineState.LINE_STATE_ASLEEP:
        return f"{told.name} is loading{told.progress and f': it {told.progress}'}"
    return ""


async def _note(line: ModelLine) -> str:
    for peer in line.client.link.peers:
        with suppress(grpc.aio.AioRpcError):  # `why_not` reports that
            stub = inference_pb2_grpc.InferenceServiceStub(peer.channel)
            models = (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=PROBE_TIMEOUT_S)).models
            return ASLEEP if any(model.sleep_level for model in models) else ""
    return ""


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

"""What all routes share: the way to the tokenizer service, the store, and the head of an answer."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import grpc
from fastapi import Request
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.config import GatewayConfig
from pagewire.gateway.batches.batches import Batches
from pagewire.gateway.core.balanced_stub import AWAY, BalancedStub
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.middleware import GracefulShutdown
from pagewire.gateway.core.request_context import request_context, time_left
from pagewire.gateway.core.siblings import Siblings
from pagewire.gateway.core.tokenizer_link import LINK_NAME, TokenizerLink
from pagewire.gateway.explain.answering import Answering
from pagewire.gateway.exposition.merge import Exposition, expose
from pagewire.gateway.files.files import Files
from pagewire.gateway.generation.answer import Head
from pagewire.gateway.generation.searches import Searches
from pagewire.gateway.kept import Keeper
from pagewire.gateway.kept.keeper import open_log
from pagewire.gateway.kept.log import Bounds
from pagewire.gateway.responses.background import Background
from pagewire.gateway.responses.output_log import OutputLog
from pagewire.gateway.responses.stored import Responses
from pagewire.gateway.status.source import StatusSource
from pagewire.gateway.store import Bound, Store
from pagewire.telemetry import metrics
from pagewire.telemetry.recent import Accounts
from pagewire.telemetry.tenant_metrics import of_tenant
from pagewire.telemetry.trace import Trace
from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagewire.wire import tenants
from pagewire.wire.admin import Neighbour, each_once, metrics_behind
from pagewire.wire.discovery import discover
from pagewire.wire.keys import Door
from pagewire.wire.secure_rpc import NO_TLS, ServiceTls
from pagewire.wire.status import error_details
from pagewire.wire.streams import Peer

CALL_TIMEOUT_S = 60.0
# For a tokenizer service that is away: as long as it takes to start again, and less than clients wait.
AWAY_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 2.0

# A call that the service died under is made so often; the next time it may be what the service dies of.
MAX_ATTEMPTS = 3
AWAY_POLL_S = 0.1
# After a broken call: seconds in which the link, on the same connection, has noticed too. Streams of a service that
# stops break a little after it has refused calls.
NOTICED_S = 1.0

Answered = TypeVar("Answered")
Metadata = Sequence[tuple[str, str]]


class Gateway:
    """What the routes share: the way to the tokenizer service, and what is kept."""

    def __init__(self, config: GatewayConfig, store: Store, tls: ServiceTls = NO_TLS) -> None:
        self.store = store
        self.files = Files(store, config.max_file_bytes, config.file_store_size)
        kept = Bound(config.max_stored_responses, config.response_store_size)
        self.responses = Responses(store, kept, config.response_store_ttl)
        self.batches = Batches(store, self.files)
        self.door = Door(config.api_keys, config.api_key_file)
        self.shutdown = GracefulShutdown()
        tokenizers = discover(config.tokenizer_discovery, "--tokenizer-address", config.tokenizer_address)
        self.link = TokenizerLink(tokenizers, tls.listed_channel, config.recovery_timeout, config.hang_timeout)
        log = OutputLog(store, config.response_store_size, config.response_store_ttl)
        self.background = Background(self.link, store, self.responses, log)
        bounds = Bounds(config.max_stored_generations, config.generation_store_size, config.generation_store_ttl)
        self.keeper = Keeper(
            open_log(config.generation_store or "disk", store.directory, bounds),
            keep_all_streams=config.resumable_streams,
        )
        self.inference: Any = BalancedStub(self.link, inference_pb2_grpc.InferenceServiceStub)
        self.searches = Searches(self.inference, self.call_to_its_end)
        self.admin: Any = BalancedStub(self.link, admin_pb2_grpc.AdminServiceStub)
        self.status = StatusSource(self.tokenizers, self.why_not_ready)
        self.answering: set[Answering] = set()
        self.accounts = Accounts(lambda: self.answering)
        self.siblings = Siblings(store.directory, metrics.exposition, self.accounts)
        self._vllm_metrics = config.vllm_metrics
        self._default_model = ""
        self._served: frozenset[str] = frozenset()

    async def default_model(self) -> str:
        """The first served name: what an answer says when the request named no model."""
        if not self._default_model:
            self._default_model = (await self.list_models())[0].id
        return self._default_model

    def served_name(self, model: str, *, answered: bool) -> str:
        """The served model that a request was for; "" if it is not known to be served, or nobody has asked yet.

        model: that it named, or "". answered: successfully.
        """
        if not model:
            return self._default_model
        return model if answered or model in self._served else ""

    def tokenizers(self) -> list[Neighbour]:
        return [Neighbour("tokenizer", peer.address, peer.channel) for peer in self.link.peers]

    async def list_models(self) -> Sequence[inference_pb2.Model]:
        models = (await self.call(self.inference.ListModels, inference_pb2.ListModelsRequest())).models
        self._served = frozenset(model.id for model in models)
        return models

    async def call(
        self, method: Callable[..., Awaitable[Answered]], request: object, metadata: Metadata = ()
    ) -> Answered:
        """A unary call to the tokenizer service; it waits for one that is away for a moment, and is made again if that
        dies under it.

        Raises grpc.aio.AioRpcError, or ApiError 503 if the service did not come back.
        """
        for attempt in itertools.count(1):
            is_away, num_breaks = self.link.is_available and not self.link.is_up, self.link.num_breaks
            timeout = _at_most(AWAY_TIMEOUT_S if is_away else CALL_TIMEOUT_S)
            if is_away:
                await self._comes(timeout)
            try:
                return await method(request, timeout=timeout, metadata=metadata, wait_for_ready=is_away)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and is_away and not self.link.is_up:
                    raise ApiError(503, AWAY) from error
                if not self.link.is_available or not _has_died(error) or attempt == MAX_ATTEMPTS:
                    raise
                await self._noticed(num_breaks)
        raise AssertionError("unreachable")

    async def call_to_its_end(
        self, method: Callable[..., Awaitable[Answered]], request: object, trace: Trace
    ) -> Answered:
        """A unary call that computes, for as long as it takes.

        It waits for a tokenizer service that is away, and is made again if that dies under it.

        Raises grpc.aio.AioRpcError, or ApiError 503 if the service did not come back.
        """
        metadata = [*tenants.metadata(), *trace.metadata]
        for attempt in itertools.count(1):
            while not self.link.is_up and self.link.is_available:  # noqa: ASYNC110 - seconds, after a death
                await asyncio.sleep(AWAY_POLL_S)
            if not self.link.is_available:
                raise ApiError(503, AWAY)
            num_breaks = self.link.num_breaks
            try:
                return await method(request, timeout=time_left(), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if not _has_died(error) or attempt == MAX_ATTEMPTS:
                    raise
                await self._noticed(num_breaks)
        raise AssertionError("unreachable")

    async def call_each(self, name: str, request: object, metadata: Metadata = ()) -> list[Any]:
        """A unary call to every tokenizer service that is there, as `call` otherwise. name: of the method."""
        peers = [peer for peer in self.link.peers if peer.is_up]
        if len(peers) < 2:
            return [await self.call(getattr(self.inference, name), request, metadata)]
        stubs = [inference_pb2_grpc.InferenceServiceStub(peer.channel) for peer in peers]
        timeout = _at_most(CALL_TIMEOUT_S)
        answers = await asyncio.gather(
            *(getattr(stub, name)(request, timeout=timeout, metadata=metadata) for stub in stubs),
            return_exceptions=True,
        )
        for answer in answers:
            # Of one that dies, requests go on elsewhere.
            if isinstance(answer, BaseException) and not (
                isinstance(answer, grpc.aio.AioRpcError) and _has_died(answer)
            ):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _comes(self, timeout: float) -> None:
        """Returns when a tokenizer service is there, or in `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                changed = self.link.changed
                while not self.link.is_up:
                    await changed.wait()
                    changed = self.link.changed

    async def _noticed(self, num_breaks: int) -> None:
        """Returns when the link has broken more often than that, too, which it soon has after a call has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(NOTICED_S):
                changed = self.link.changed
                while self.link.num_breaks == num_breaks:
                    await changed.wait()
                    changed = self.link.changed

    async def why_not_ready(self) -> str:
        """Why the line cannot serve; "" if it can."""
        if self.shutdown.announced:
            return "this gateway is shutting down"
        if not self.link.peers:
            return "no tokenizer service is known yet"
        reasons = await asyncio.gather(*map(_why_not_ready, self.link.peers))
        return "" if "" in reasons else reasons[0]

    async def metrics(self, accept: str = "", tenant: str | None = None) -> Exposition:
        """Metrics of every service, and of every gateway of this data directory, that answers. accept: the header.
        tenant: who asks, and is told of no other; None: one who may know of all."""
        request = admin_pb2.GetMetricsRequest()
        own, *behind = await asyncio.gather(
            self.siblings.metrics(),
            *(metrics_behind(one, request, 2 * PROBE_TIMEOUT_S) for one in self.tokenizers()),
        )
        if not self._default_model and self.link.is_up:
            with suppress(ApiError, grpc.aio.AioRpcError):
                await self.default_model()
        services = of_tenant([*own, *each_once(behind)], tenant)
        # Parsing a few thousand lines takes longer than a token may wait.
        return await asyncio.to_thread(
            expose, services, accept, self._default_model, with_vllm_names=self._vllm_metrics
        )


async def _why_not_ready(peer: Peer[Any, Any]) -> str:
    """As `Gateway.why_not_ready`, of one tokenizer service."""
    request = health_pb2.HealthCheckRequest(service=LINK_NAME)
    try:
        health = await health_pb2_grpc.HealthStub(peer.channel).Check(request, timeout=PROBE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        return f"the tokenizer service does not answer: {error.code().name}: {error.details()}"
    if not peer.is_up:
        return "the stream to the tokenizer service is not up yet"
    if health.status != health_pb2.HealthCheckResponse.SERVING:
        return "the tokenizer service is up, but what is behind it is not ready: still loading, or restarting"
    return ""


def _has_died(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call has failed on the way: a service that refuses one says when to come again. What is just arriving
    when a server is stopped, gRPC cancels."""
    is_refused = error_details.retry_delay_of(error) is not None
    return error.code() is grpc.StatusCode.CANCELLED or (error.code() is grpc.StatusCode.UNAVAILABLE and not is_refused)


def _at_most(seconds: float) -> float:
    """Or what the present request has left."""
    left = time_left()
    return seconds if left is None else min(seconds, left)


def gateway_of(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


class NamedBody(Protocol):
    """A body that may say which model it is for, and its own id."""

    model: str | None
    request_id: str | None


async def head_of(request: Request, body: NamedBody, prefix: str) -> Head:
    context = request_context(request.scope)
    if body.request_id is not None and "x-request-id" not in request.headers:
        context.request_id = body.request_id
    model = body.model or await gateway_of(request).default_model()
    return Head(id=f"{prefix}-{context.request_id}", created=context.created, model=model)

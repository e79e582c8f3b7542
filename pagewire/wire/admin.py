"""The API of every service for operators: metrics and status of the service and of all services behind it."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol, TypeVar

import grpc

from pagewire.process.cpu_sets import cpu_text, usable_cpus
from pagewire.telemetry import metrics
from pagewire.telemetry.recent import Accounts
from pagewire.telemetry.tenant_metrics import of_tenant
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.v1.admin_pb2 import RequestAccount, ServiceMetrics, ServiceState, ServiceStatus
from pagewire.wire import tenants
from pagewire.wire.status.rpc_error import RpcError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
# The share of the remaining time for the next service: a slow service far away must not make a near one look dead.
_SHARE_OF_TIME = 0.7
_STARTED = time.monotonic()


class Adapters(Protocol):
    """Implements LoadAdapter and UnloadAdapter. Both raise RpcError."""

    async def load(
        self, request: admin_pb2.AdminServiceLoadAdapterRequest
    ) -> admin_pb2.AdminServiceLoadAdapterResponse: ...

    async def unload(
        self, request: admin_pb2.AdminServiceUnloadAdapterRequest
    ) -> admin_pb2.AdminServiceUnloadAdapterResponse: ...


class PrefixCaches(Protocol):
    """Implements ResetPrefixCache and SubscribeKvEvents. Both raise RpcError."""

    async def reset(self, request: admin_pb2.ResetPrefixCacheRequest) -> admin_pb2.ResetPrefixCacheResponse: ...

    def subscribe(
        self, request: admin_pb2.SubscribeKvEventsRequest
    ) -> AsyncGenerator[admin_pb2.SubscribeKvEventsResponse]: ...


class Sleep(Protocol):
    """Implements SleepModel and WakeModel. Both raise RpcError."""

    async def sleep(self, request: admin_pb2.SleepModelRequest) -> admin_pb2.SleepModelResponse: ...

    async def wake(self, request: admin_pb2.WakeModelRequest) -> admin_pb2.WakeModelResponse: ...


# Implements ReplaceWeights. Raises RpcError.
ReplaceWeights = Callable[[admin_pb2.ReplaceWeightsRequest], Awaitable[admin_pb2.ReplaceWeightsResponse]]
# Fills in the details of a status; the second argument: with maps of KV blocks.
Describe = Callable[[ServiceStatus, bool], None]


class Neighbour(NamedTuple):
    """A service behind this one."""

    service: str
    address: str
    channel: grpc.aio.Channel


def own_status(service: str, *, is_serving: bool) -> ServiceStatus:
    """Returns the status of this process."""
    state = ServiceState.SERVICE_STATE_SERVING if is_serving else ServiceState.SERVICE_STATE_NOT_SERVING
    uptime = time.monotonic() - _STARTED
    cpus = cpu_text(usable_cpus())
    return ServiceStatus(service=service, state=state, pid=os.getpid(), uptime_seconds=uptime, cpus=cpus)


async def status_behind(
    neighbour: Neighbour, request: admin_pb2.GetStatusRequest, timeout: float = _TIMEOUT_S
) -> list[ServiceStatus]:
    """Returns the status of a neighbour and of the services behind it.

    A neighbour that does not answer within `timeout` seconds is UNREACHABLE.
    """
    try:
        stub = admin_pb2_grpc.AdminServiceStub(neighbour.channel)
        services = list((await stub.GetStatus(request, timeout=timeout)).services)
        services[0].address = neighbour.address
    except grpc.aio.AioRpcError as error:
        state = ServiceState.SERVICE_STATE_UNREACHABLE
        detail = f"{error.code().name}: {error.details()}"
        return [ServiceStatus(service=neighbour.service, address=neighbour.address, state=state, detail=detail)]
    return services


async def metrics_behind(
    neighbour: Neighbour, request: admin_pb2.GetMetricsRequest, timeout: float = _TIMEOUT_S
) -> list[ServiceMetrics]:
    """Returns the metrics of a neighbour and of the services behind it; [] if it does not answer within `timeout` s."""
    try:
        stub = admin_pb2_grpc.AdminServiceStub(neighbour.channel)
        services = list((await stub.GetMetrics(request, timeout=timeout)).services)
    except grpc.aio.AioRpcError as error:
        logger.debug("no metrics of the %s at %s: %s", neighbour.service, neighbour.address, error.details())
        return []
    services[0].address = neighbour.address
    return services


async def accounts_behind(
    neighbour: Neighbour, request: admin_pb2.ExplainRequestRequest, timeout: float = _TIMEOUT_S
) -> list[RequestAccount]:
    """Returns the accounts of a request at a neighbour and the services behind it; [] if it does not answer in time."""
    if neighbour.service == "executor":
        return []
    try:
        stub = admin_pb2_grpc.AdminServiceStub(neighbour.channel)
        accounts = list((await stub.ExplainRequest(request, timeout=timeout)).accounts)
    except grpc.aio.AioRpcError as error:
        logger.debug("no account of the %s at %s: %s", neighbour.service, neighbour.address, error.details())
        return []
    for account in accounts:
        if account.service == neighbour.service and not account.address:
            account.address = neighbour.address
    return accounts


Report = TypeVar("Report", ServiceStatus, ServiceMetrics)
Offer = TypeVar("Offer")


def each_once(reports: Sequence[Sequence[Report]]) -> list[Report]:
    """Returns one report of each service, from those of several neighbours with common services behind them."""
    found: dict[tuple[str, str], Report] = {}
    for one in (one for part in reports for one in part):
        known = found.setdefault((one.service, one.address), one)
        if isinstance(known, ServiceStatus) and known.state == ServiceState.SERVICE_STATE_UNREACHABLE:
            found[one.service, one.address] = one
    return list(found.values())


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """AdminService of one service."""

    def __init__(
        self,
        service: str,
        behind: Callable[[], Sequence[Neighbour]],
        is_serving: Callable[[], bool],
        describe: Describe,
        replace_weights: ReplaceWeights | None = None,
        accounts: Accounts | None = None,
        adapters: Adapters | None = None,
        caches: PrefixCaches | None = None,
        sleep: Sleep | None = None,
    ) -> None:
        """behind: returns the current neighbours. replace_weights, adapters, caches, sleep: None if the service does
        not offer them. accounts: of requests; None if the service keeps none."""
        self._caches, self._sleep = caches, sleep
        self._accounts = accounts
        self._adapters = adapters
        self._service = service
        self._replace_weights = replace_weights
        self._behind = behind
        self._is_serving = is_serving
        self._describe = describe

    async def GetMetrics(
        self, request: admin_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetMetricsResponse:
        own = admin_pb2.ServiceMetrics(service=self._service, exposition=metrics.exposition())
        timeout = _timeout_behind(context)
        behind = await asyncio.gather(*(metrics_behind(one, request, timeout) for one in self._behind()))
        services = [own, *(one for services in behind for one in services)]
        return admin_pb2.GetMetricsResponse(services=of_tenant(services, tenants.caller_scope()))

    async def ExplainRequest(
        self, request: admin_pb2.ExplainRequestRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ExplainRequestResponse:
        if (tenant := tenants.caller_scope()) is not None:
            request.tenant = tenant
        of_tenant = request.tenant if request.HasField("tenant") else None
        timeout = _timeout_behind(context)
        behind = await asyncio.gather(*(accounts_behind(one, request, timeout) for one in self._behind()))
        # Read last, so that the time of a running request here is not less than at the services behind.
        own = self._accounts.find(request.request_id, of_tenant) if self._accounts is not None else []
        return admin_pb2.ExplainRequestResponse(accounts=[*own, *(one for accounts in behind for one in accounts)])

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        own = own_status(self._service, is_serving=self._is_serving())
        self._describe(own, request.with_kv_maps)
        timeout = _timeout_behind(context)
        behind = await asyncio.gather(*(status_behind(one, request, timeout) for one in self._behind()))
        return admin_pb2.GetStatusResponse(services=[own, *(status for statuses in behind for status in statuses)])

    async def ReplaceWeights(
        self, request: admin_pb2.ReplaceWeightsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ReplaceWeightsResponse:
        return await _offered(self._replace_weights, "weights cannot be replaced")(request)

    async def LoadAdapter(
        self, request: admin_pb2.AdminServiceLoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.AdminServiceLoadAdapterResponse:
        return await _offered(self._adapters, "adapters cannot be loaded").load(request)

    async def UnloadAdapter(
        self, request: admin_pb2.AdminServiceUnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.AdminServiceUnloadAdapterResponse:
        return await _offered(self._adapters, "adapters cannot be loaded").unload(request)

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ResetPrefixCacheResponse:
        return await _offered(self._caches, "there is no prefix cache").reset(request)

    async def SubscribeKvEvents(
        self, request: admin_pb2.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[admin_pb2.SubscribeKvEventsResponse]:
        async with aclosing(_offered(self._caches, "there is no prefix cache").subscribe(request)) as messages:
            async for message in messages:
                yield message

    async def SleepModel(
        self, request: admin_pb2.SleepModelRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SleepModelResponse:
        return await _offered(self._sleep, "no model can be put to sleep").sleep(request)

    async def WakeModel(
        self, request: admin_pb2.WakeModelRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.WakeModelResponse:
        return await _offered(self._sleep, "no model can be put to sleep").wake(request)


def _offered(offer: Offer | None, what: str) -> Offer:
    """Returns what the service offers; raises RpcError if it offers nothing. what: that cannot be done then."""
    if offer is None:
        what += " here; ask a tokenizer service or the scheduler"
        raise RpcError(grpc.StatusCode.UNIMPLEMENTED, what)
    return offer


def _timeout_behind(context: grpc.aio.ServicerContext) -> float:
    """Returns the seconds in which the services behind this one have to answer."""
    remaining = context.time_remaining()
    return _TIMEOUT_S if remaining is None else min(_TIMEOUT_S, _SHARE_OF_TIME * remaining)

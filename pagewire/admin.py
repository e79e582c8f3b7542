"""What every service offers its operators: metrics and status, its own and of all services behind it."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import grpc

from pagewire import error_details, telemetry
from pagewire.rpc_error import RpcError
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.v1.admin_pb2 import ServiceState, ServiceStatus

logger = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
# Of the time that the caller has left, for the next service: what is far away must not make what is near look dead.
_SHARE_OF_TIME = 0.7
_STARTED = time.monotonic()

# Answers ReplaceWeights. Raises RpcError.
ReplaceWeights = Callable[[admin_pb2.ReplaceWeightsRequest], Awaitable[admin_pb2.ReplaceWeightsResponse]]
# Fills in the details of a service; the second argument: whether with maps of KV blocks.
Describe = Callable[[ServiceStatus, bool], None]


class Neighbour(NamedTuple):
    """A service behind this one."""

    service: str
    address: str
    channel: grpc.aio.Channel


def own_status(service: str, *, is_serving: bool) -> ServiceStatus:
    """Of this process."""
    state = ServiceState.SERVICE_STATE_SERVING if is_serving else ServiceState.SERVICE_STATE_NOT_SERVING
    uptime = time.monotonic() - _STARTED
    return ServiceStatus(service=service, state=state, pid=os.getpid(), uptime_seconds=uptime)


async def status_behind(
    neighbour: Neighbour, request: admin_pb2.GetStatusRequest, timeout: float = _TIMEOUT_S
) -> list[ServiceStatus]:
    """A neighbour's status and those behind it; UNREACHABLE if it does not answer within `timeout` seconds."""
    try:
        stub = admin_pb2_grpc.AdminServiceStub(neighbour.channel)
        services = list((await stub.GetStatus(request, timeout=timeout)).services)
        services[0].address = neighbour.address
    except grpc.aio.AioRpcError as error:
        state = ServiceState.SERVICE_STATE_UNREACHABLE
        detail = f"{error.code().name}: {error.details()}"
        return [ServiceStatus(service=neighbour.service, address=neighbour.address, state=state, detail=detail)]
    return services


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(
        self,
        service: str,
        behind: Callable[[], Sequence[Neighbour]],
        is_serving: Callable[[], bool],
        describe: Describe,
        replace_weights: ReplaceWeights | None = None,
    ) -> None:
        """behind: those that are there now. replace_weights: None, where that is not offered."""
        self._service = service
        self._replace_weights = replace_weights
        self._behind = behind
        self._is_serving = is_serving
        self._describe = describe

    async def GetMetrics(
        self, request: admin_pb2.GetMetricsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetMetricsResponse:
        own = admin_pb2.ServiceMetrics(service=self._service, exposition=telemetry.exposition())
        response = admin_pb2.GetMetricsResponse(services=[own])
        answers = await asyncio.gather(
            *(
                admin_pb2_grpc.AdminServiceStub(one.channel).GetMetrics(request, timeout=_TIMEOUT_S)
                for one in self._behind()
            ),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, grpc.aio.AioRpcError):
                logger.debug("no metrics from behind the %s: %s", self._service, answer.details())
            elif isinstance(answer, BaseException):
                raise answer
            else:
                response.services.extend(answer.services)
        return response

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetStatusResponse:
        own = own_status(self._service, is_serving=self._is_serving())
        self._describe(own, request.with_kv_maps)
        remaining = context.time_remaining()
        timeout = _TIMEOUT_S if remaining is None else min(_TIMEOUT_S, _SHARE_OF_TIME * remaining)
        behind = await asyncio.gather(*(status_behind(one, request, timeout) for one in self._behind()))
        return admin_pb2.GetStatusResponse(services=[own, *(status for statuses in behind for status in statuses)])

    async def ReplaceWeights(
        self, request: admin_pb2.ReplaceWeightsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ReplaceWeightsResponse:
        if self._replace_weights is None:
            raise RpcError(
                grpc.StatusCode.UNIMPLEMENTED,
                "weights are replaced through a tokenizer service or the scheduler",
            )
        return await self._replace_weights(request)


def replace_behind(channel: grpc.aio.Channel) -> ReplaceWeights:
    """Leaves it to the next service."""
    stub = admin_pb2_grpc.AdminServiceStub(channel)

    async def replace(request: admin_pb2.ReplaceWeightsRequest) -> admin_pb2.ReplaceWeightsResponse:
        try:
            return await stub.ReplaceWeights(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and not error_details.is_of_service(error):
                raise RpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"the scheduler went away ({error.details()}): GetStatus or /v1/status says which weights are in"
                    " force; try again",
                ) from error
            raise RpcError.from_call(error) from error

    return replace

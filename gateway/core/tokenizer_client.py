"""The client of the tokenizer services of a model: streams of generations, unary calls, recovery when they restart."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import grpc

from pagewire.config import GatewayConfig
from pagewire.gateway.core.balanced_stub import AWAY, AdminStub, BalancedStub, InferenceStub, Method
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.request_context import time_left
from pagewire.gateway.core.tokenizer_link import TokenizerLink
from pagewire.telemetry.trace import Trace
from pagewire.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from pagewire.wire import tenants
from pagewire.wire.admin import Neighbour
from pagewire.wire.discovery.listed import Discovery, Listed
from pagewire.wire.status import error_details

CALL_TIMEOUT_S = 60.0
# Seconds to wait for an unreachable tokenizer service: as long as a restart takes, and less than clients wait.
AWAY_TIMEOUT_S = 10.0

# Attempts at a call during which the service dies: the call may be the cause.
MAX_ATTEMPTS = 3
AWAY_POLL_S = 0.1
# After a broken call: seconds until the link, on the same connection, breaks too. The streams of a service that stops
# break a little after it begins to refuse calls.
NOTICED_S = 1.0

Answered = TypeVar("Answered")
Metadata = Sequence[tuple[str, str]]


class Served(Protocol):
    """The model of the services, which they may not have loaded."""

    def address(self, request: Any) -> None:
        """Replaces the name of the model in a request by one that the services know."""

    async def reach(self, *, computes: bool) -> None:
        """Returns when the services can be called or, if it `computes`, have the model loaded. Raises ApiError."""


class TokenizerClient:
    """The tokenizer services of one model, as the routes of all APIs use them."""

    def __init__(
        self, found: Discovery, config: GatewayConfig, connect: Callable[[Listed], grpc.aio.Channel], served: Served
    ) -> None:
        """connect: makes the channel to a listed service."""
        self._served = served
        self.link = TokenizerLink(found, connect, config.recovery_timeout, config.hang_timeout)
        self.inference = cast(InferenceStub, BalancedStub(self.link, inference_pb2_grpc.InferenceServiceStub))
        self.admin = cast(AdminStub, BalancedStub(self.link, admin_pb2_grpc.AdminServiceStub))

    async def list_models(self) -> Sequence[inference_pb2.Model]:
        """Returns the served models, the default one first, and the adapters. Raises like call()."""
        return (await self.call(self.inference.ListModels, inference_pb2.ListModelsRequest())).models

    def neighbours(self) -> list[Neighbour]:
        return [Neighbour("tokenizer", peer.address, peer.channel) for peer in self.link.peers]

    async def call(
        self, method: Method[Answered], request: object, metadata: Metadata = (), *, needs_model: bool = True
    ) -> Answered:
        """Makes a unary call. It waits briefly for an unreachable service, and is repeated if the service dies.

        needs_model: whether it waits while the model is loaded. Raises grpc.aio.AioRpcError, or ApiError 503 if the
        service did not come back.
        """
        self._served.address(request)
        if needs_model:
            await self._served.reach(computes=False)
        for attempt in itertools.count(1):
            is_away, num_breaks = self.link.is_available and not self.link.is_up, self.link.num_breaks
            timeout = _at_most(AWAY_TIMEOUT_S if is_away else CALL_TIMEOUT_S)
            if is_away:
                await self._wait_until(lambda: self.link.is_up, timeout)
            try:
                return await method(request, timeout=timeout, metadata=metadata, wait_for_ready=is_away)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and is_away and not self.link.is_up:
                    raise ApiError(503, AWAY) from error
                if not self.link.is_available or not has_died(error) or attempt == MAX_ATTEMPTS:
                    raise
                await self._wait_until(partial(self._has_broken, num_breaks), NOTICED_S)
        raise AssertionError("unreachable")

    async def call_to_its_end(
        self, method: Method[Answered], request: object, trace: Trace, *, computes: bool = True
    ) -> Answered:
        """Makes a unary call that may take long, limited only by the deadline of the request.

        It waits for an unreachable tokenizer service, and is repeated if the service dies during the call.

        Raises grpc.aio.AioRpcError, or ApiError 503 if the service did not come back.
        """
        metadata = [*tenants.metadata(), *trace.metadata]
        self._served.address(request)
        await self._served.reach(computes=computes)
        for attempt in itertools.count(1):
            while not self.link.is_up and self.link.is_available:  # noqa: ASYNC110 - seconds, after a death
                await asyncio.sleep(AWAY_POLL_S)
            if not self.link.is_available:
                raise ApiError(503, AWAY)
            num_breaks = self.link.num_breaks
            try:
                return await method(request, timeout=time_left(), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                if not has_died(error) or attempt == MAX_ATTEMPTS:
                    raise
                await self._wait_until(partial(self._has_broken, num_breaks), NOTICED_S)
        raise AssertionError("unreachable")

    async def _wait_until(self, is_so: Callable[[], bool], timeout: float) -> None:
        """Returns when something is so of the link, or in `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                changed = self.link.changed
                while not is_so():
                    await changed.wait()
                    changed = self.link.changed

    def _has_broken(self, num_breaks: int) -> bool:
        """Returns whether the link has broken more than `num_breaks` times, which it soon does after a broken call."""
        return self.link.num_breaks > num_breaks


def has_died(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether the service died during a call. A service that refuses a call names a delay for the next attempt;
    gRPC cancels the calls that arrive while a server stops."""
    is_refused = error_details.retry_delay_of(error) is not None
    return error.code() is grpc.StatusCode.CANCELLED or (error.code() is grpc.StatusCode.UNAVAILABLE and not is_refused)


def _at_most(seconds: float) -> float:
    """Returns `seconds`, or the time left to the present request if that is less."""
    left = time_left()
    return seconds if left is None else min(seconds, left)

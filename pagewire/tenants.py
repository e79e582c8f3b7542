"""Whose the present request is: decided here, for HTTP, gRPC and what is done later.

A tenant has a fair part of the machine; it is no login. Its name is believed where --tenant-header says so.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import grpc

from pagewire.rpc import RpcError
from pagewire.v1.common_pb2 import RequestContext

# In metadata, between services.
_NAME, _WEIGHT = "pagewire-tenant", "pagewire-tenant-weight"
_NAMES = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")


class Tenant(NamedTuple):
    name: str = ""  # "" = nobody in particular
    weight: float = 0.0  # share among others; 0 = 1


NOBODY = Tenant()
present: ContextVar[Tenant] = ContextVar("tenant", default=NOBODY)


def named(header: str, values: Sequence[str]) -> Tenant:
    """header: of --tenant-header. values: all that came with a request. Raises ValueError."""
    if not values:
        return NOBODY
    if len(values) > 1 or not _NAMES.fullmatch(values[0]):
        raise ValueError(f"{header} names a tenant: give it once, with 1 to 128 printable ASCII characters")
    return Tenant(values[0])


def tell(tenant: Tenant, context: RequestContext) -> RequestContext:
    """Whose request it is, to the next service."""
    context.tenant, context.tenant_weight = tenant
    return context


def metadata() -> list[tuple[str, str]]:
    """What says the same in a single call of another service."""
    name, weight = present.get()
    return [(_NAME, name), (_WEIGHT, str(weight))] if name else []


class TenantInterceptor(grpc.aio.ServerInterceptor):
    """Finds out whose each call is."""

    def __init__(self, header: str | None = None) -> None:
        """header: in which clients say it; None: the callers are services."""
        self._header = header

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        given = [(key, _text(value)) for key, value in handler_call_details.invocation_metadata or ()]
        if self._header is None:
            told = dict(given)
            tenant = Tenant(told.get(_NAME, ""), float(told.get(_WEIGHT, 0)))
        else:
            try:
                tenant = named(self._header, [value for key, value in given if key == self._header.lower()])
            except ValueError as error:
                return _refusing(RpcError(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
        present.set(tenant)  # for the handler, too: it runs in this task
        return await continuation(handler_call_details)


def of_clients(header: str | None) -> Sequence[TenantInterceptor]:
    """Of a server that clients reach. header: of --tenant-header."""
    return () if header is None else (TenantInterceptor(header),)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _refusing(error: RpcError) -> grpc.RpcMethodHandler:
    async def refuse(requests: object, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await error.abort(context)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)

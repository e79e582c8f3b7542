"""Whose the present request is: decided here, for HTTP, gRPC and what is done later.

Of a key with an owner, it is the owner's. Otherwise a header says it, where --tenant-header lets it be believed.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import grpc

from pagewire.errors import StartupError
from pagewire.v1.common_pb2 import RequestContext
from pagewire.wire.keys import caller
from pagewire.wire.status.rpc_error import RpcError

# In metadata, between services.
_NAME, _WEIGHT, _TOKENS = "pagewire-tenant", "pagewire-tenant-weight", "pagewire-tenant-tokens-per-minute"
# Of a header, as HTTP and gRPC's metadata both take it; what says something else already says no tenant.
_HEADERS = re.compile(r"(?!grpc-)[a-z0-9][a-z0-9_.-]{0,63}(?<!-bin)", re.IGNORECASE)
_TAKEN = frozenset({"authorization", "connection", "content-length", "content-type", "host", "te", "x-api-key"})
_NAMES = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")


class Tenant(NamedTuple):
    name: str = ""  # "" = nobody in particular
    weight: float = 0.0  # share among others; 0 = 1
    tokens_per_minute: int = 0  # 0 = any number


NO_TENANT = Tenant()
present: ContextVar[Tenant] = ContextVar("tenant", default=NO_TENANT)


def check_header(header: str | None) -> None:
    """header: of --tenant-header. Raises StartupError for what cannot be one."""
    if header is not None and (not _HEADERS.fullmatch(header) or header.lower() in _TAKEN):
        raise StartupError(
            f"--tenant-header {header!r} is no name for this: give one of letters, digits, - and _ that says nothing"
            " else and does not begin with grpc- or end with -bin, as X-Tenant-ID"
        )


def of_client(header: str | None, values: Sequence[str]) -> Tenant:
    """The owner of the present key, or whom a header names. header: of --tenant-header. values: all that came with it.

    Raises ValueError.
    """
    if (key := caller.get()) is not None and key.name:
        return Tenant(key.name, key.weight, key.tokens_per_minute)
    if header is None or not values:
        return NO_TENANT
    if len(values) > 1 or not _NAMES.fullmatch(values[0]):
        raise ValueError(f"{header} names a tenant: give it once, with 1 to 128 printable ASCII characters")
    return Tenant(values[0])


def caller_scope() -> str | None:
    """The tenant whose requests the present caller may end; None: all, as one who may change the service or where there
    are no tenants."""
    if (key := caller.get()) is not None:
        return None if key.admin else key.name
    return present.get().name or None


def attach(tenant: Tenant, context: RequestContext) -> RequestContext:
    """Whose request it is, to the next service."""
    context.tenant, context.tenant_weight, context.tokens_per_minute = tenant
    return context


def metadata() -> list[tuple[str, str]]:
    """What says the same in a single call of another service."""
    name, *numbers = present.get()
    return [(_NAME, name), *zip((_WEIGHT, _TOKENS), map(str, numbers), strict=True)] if name else []


class ServiceTenants(grpc.aio.ServerInterceptor):
    """Whose the calls of other services are, as they say."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        told = {key: _text(value) for key, value in handler_call_details.invocation_metadata or ()}
        tenant = Tenant(told.get(_NAME, ""), float(told.get(_WEIGHT, 0)), int(told.get(_TOKENS, 0)))
        present.set(tenant)  # for the handler: it runs in this task
        return await continuation(handler_call_details)


class ClientTenants(grpc.aio.ServerInterceptor):
    """Whose the calls of clients are. Behind that of keys."""

    def __init__(self, header: str | None) -> None:
        """header: of --tenant-header. Raises StartupError."""
        check_header(header)
        self._header = header

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        name = (self._header or "").lower()
        given = [_text(value) for key, value in handler_call_details.invocation_metadata or () if key == name]
        try:
            present.set(of_client(self._header, given))
        except ValueError as error:
            return _refusing(RpcError(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
        return await continuation(handler_call_details)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _refusing(error: RpcError) -> grpc.RpcMethodHandler:
    async def refuse(requests: object, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        await error.abort(context)
        yield b""

    return grpc.stream_stream_rpc_method_handler(refuse)

"""The tenant of the current request, for HTTP, gRPC and later work.

It is the owner of the key, if the key has one, else the value of the header that --tenant-header names.
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

# Metadata between services.
_NAME, _WEIGHT, _TOKENS = "pagewire-tenant", "pagewire-tenant-weight", "pagewire-tenant-tokens-per-minute"
# Names of headers that both HTTP and gRPC metadata allow, except those with another meaning.
_HEADERS = re.compile(r"(?!grpc-)[a-z0-9][a-z0-9_.-]{0,63}(?<!-bin)", re.IGNORECASE)
_TAKEN = frozenset({"authorization", "connection", "content-length", "content-type", "host", "te", "x-api-key"})
_NAMES = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")


class Tenant(NamedTuple):
    name: str = ""  # "": no tenant
    weight: float = 0.0  # share among others; 0: 1
    tokens_per_minute: int = 0  # 0: no limit


NO_TENANT = Tenant()
present: ContextVar[Tenant] = ContextVar("tenant", default=NO_TENANT)


def check_header(header: str | None) -> None:
    """Checks the value of --tenant-header. Raises StartupError."""
    if header is not None and (not _HEADERS.fullmatch(header) or header.lower() in _TAKEN):
        raise StartupError(
            f"--tenant-header {header!r} cannot name tenants: use letters, digits, - and _, no header with another"
            " meaning, no grpc- at the beginning and no -bin at the end, for instance X-Tenant-ID"
        )


def of_client(header: str | None, values: Sequence[str]) -> Tenant:
    """Returns the owner of the current key, or the tenant that the header names. Raises ValueError.

    header: of --tenant-header. values: all its values in the request.
    """
    if (key := caller.get()) is not None and key.name:
        return Tenant(key.name, key.weight, key.tokens_per_minute)
    if header is None or not values:
        return NO_TENANT
    if len(values) > 1 or not _NAMES.fullmatch(values[0]):
        raise ValueError(f"{header} names a tenant: send it once, with 1 to 128 printable ASCII characters")
    return Tenant(values[0])


def caller_scope() -> str | None:
    """Returns the only tenant with requests that the current caller may see or end; None: no restriction.

    Administrators, and callers without a tenant, are not restricted.
    """
    if (key := caller.get()) is not None:
        return None if key.admin else key.name
    return present.get().name or None


def attach(tenant: Tenant, context: RequestContext) -> RequestContext:
    """Writes the tenant of a request to its context, for the next service, and returns the context."""
    context.tenant, context.tenant_weight, context.tokens_per_minute = tenant
    return context


def metadata() -> list[tuple[str, str]]:
    """Returns the metadata that carries the current tenant in a single call."""
    name, *numbers = present.get()
    return [(_NAME, name), *zip((_WEIGHT, _TOKENS), map(str, numbers), strict=True)] if name else []


class ServiceTenants(grpc.aio.ServerInterceptor):
    """Sets the tenant of calls of other services, from their metadata."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        metadata = {key: _text(value) for key, value in handler_call_details.invocation_metadata or ()}
        tenant = Tenant(metadata.get(_NAME, ""), float(metadata.get(_WEIGHT, 0)), int(metadata.get(_TOKENS, 0)))
        present.set(tenant)  # for the handler: it runs in this task
        return await continuation(handler_call_details)


class ClientTenants(grpc.aio.ServerInterceptor):
    """Sets the tenant of calls of clients. It runs behind KeyInterceptor."""

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

"""Interceptors that check API keys before public RPCs."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any

import grpc

from pagewire.config import PublicListenConfig
from pagewire.wire.addresses import is_loopback
from pagewire.wire.keys import Door, caller
from pagewire.wire.keys.header import bearer
from pagewire.wire.status.rpc_error import RpcError

# Supervisors check health without a key.
_OPEN = "/grpc.health.v1.Health/"
# Calls that only report or end something have no limits.
_UNLIMITED = ("Abort", "Get", "List")
_ADMIN = ".AdminService"
MESSAGE = "missing or wrong API key: send it as metadata, authorization: Bearer KEY"


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Checks the key of each call. It runs behind StatusInterceptor, which converts its errors to statuses."""

    def __init__(self, door: Door) -> None:
        self._door = door

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method = handler_call_details.method
        if method.startswith(_OPEN):
            return await continuation(handler_call_details)
        key = self._door.find(_given(handler_call_details))
        if key is None:
            return grpc.stream_stream_rpc_method_handler(_refuse)
        caller.set(key)  # for the handler, too: it runs in this task
        handler = await continuation(handler_call_details)
        if handler is None or not method.startswith("/pagewire.") or _is_unlimited(method):
            return handler
        return _held(handler, lambda: self._door.admit(key))


class AdminInterceptor(grpc.aio.ServerInterceptor):
    """Checks calls that change the service for all clients. It runs behind KeyInterceptor, if there is one."""

    def __init__(self, *, is_private: bool) -> None:
        """is_private: other machines cannot reach this server."""
        self._is_private = is_private

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        service, _, name = handler_call_details.method.rpartition("/")
        key = caller.get()
        may = self._is_private if key is None else key.admin
        if may or not service.endswith(_ADMIN) or name.startswith("Get"):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse_change)


def interceptors(config: PublicListenConfig) -> Sequence[grpc.aio.ServerInterceptor]:
    """Returns the interceptors of the public server. Raises StartupError for a file that cannot be read."""
    door = Door(config.api_keys, config.api_key_file)
    admin = AdminInterceptor(is_private=all(map(_is_private, config.public_listen.split(","))))
    return [admin] if door.is_open else [KeyInterceptor(door), admin]


def _is_private(address: str) -> bool:
    return address.startswith("unix:") or is_loopback(address.rpartition(":")[0].strip("[]"))


def _given(details: grpc.HandlerCallDetails) -> list[bytes]:
    values = dict[str, Any](details.invocation_metadata or ())
    given = values.get("authorization", b"")
    return [bearer(given.encode() if isinstance(given, str) else given)]


def _is_unlimited(method: str) -> bool:
    service, _, name = method.rpartition("/")
    return service.endswith(_ADMIN) or name.startswith(_UNLIMITED)


async def _refuse_change(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    message = (
        "this call changes the service for all clients or shows their prompts: use the key of --api-key or one made by"
        " `pagewire keys add --admin`, or, without keys, serve on loopback"
    )
    await RpcError(grpc.StatusCode.PERMISSION_DENIED, message).abort(context)
    yield b""


async def _refuse(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    await RpcError(grpc.StatusCode.UNAUTHENTICATED, MESSAGE).abort(context)
    yield b""  # never reached; it makes this function a generator


def _held(handler: grpc.RpcMethodHandler, admit: Callable[[], AbstractContextManager[None]]) -> grpc.RpcMethodHandler:
    """Returns the handler of a single request, which runs within admit()."""
    if handler.response_streaming:

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            with admit():
                async with aclosing(handler.unary_stream(request, context)) as responses:
                    async for response in responses:
                        yield response

        return grpc.unary_stream_rpc_method_handler(stream, handler.request_deserializer, handler.response_serializer)

    async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with admit():
            return await handler.unary_unary(request, context)

    return grpc.unary_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)

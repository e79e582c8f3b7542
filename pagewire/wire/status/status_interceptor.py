"""Converts the exceptions of handlers to gRPC statuses."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

import grpc

from pagewire.wire.status.rpc_error import RpcError
from pagewire.wire.status.undecodable import Deserializer, Undecodable

logger = logging.getLogger(__name__)


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Converts RpcError to its status; any other exception becomes INTERNAL and is logged."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Task[Any]] = set()  # running calls
        self._links: set[asyncio.Task[Any]] = set()  # of these, streams of requests, which end when they are cut off
        self._is_cut_off = False

    def cut_off(self) -> None:
        """Ends the running calls of clients with UNAVAILABLE."""
        self._is_cut_off = True
        for call in self._calls:
            call.cancel()

    async def ended(self, timeout: float) -> None:
        """Waits at most `timeout` seconds for calls to finish."""
        if calls := self._calls - self._links:
            await asyncio.wait(calls, timeout=timeout)

    async def links_ended(self, timeout: float) -> None:
        """Waits at most `timeout` seconds for streams of requests to send their statuses."""
        if self._links:
            await asyncio.wait(set(self._links), timeout=timeout)

    @contextmanager
    def _running(self, *, is_link: bool = False) -> Iterator[None]:
        """Registers the call of the current task. Raises RpcError if it is cut off."""
        call = asyncio.current_task()
        assert call is not None
        self._calls.add(call)
        if is_link:
            self._links.add(call)
        try:
            yield
        except asyncio.CancelledError as error:
            if not self._is_cut_off:
                raise
            call.uncancel()
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "this service is shutting down; try again") from error
        finally:
            self._calls.discard(call)
            self._links.discard(call)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/pagewire."):
            return handler
        deserialize: Callable[[bytes], Any] = Deserializer(method, handler.request_deserializer)
        if handler.request_streaming:
            deserialize = partial(_decoded, deserialize)
        if handler.response_streaming:
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            inner_stream = handler.stream_stream or handler.unary_stream

            # A coroutine that writes, not a generator: after a cancellation, the handler then cleans up at once, and
            # not when the garbage collector finds it.
            async def stream(request: Any, context: grpc.aio.ServicerContext) -> None:
                try:
                    _check_decoded(request)
                    with self._running(is_link=handler.request_streaming):
                        async with aclosing(inner_stream(request, context)) as responses:
                            async for response in responses:
                                await context.write(response)
                except RpcError as error:
                    await error.abort(context)
                except (grpc.aio.AbortError, asyncio.CancelledError):
                    raise
                except Exception as error:
                    await _abort_internal(context, method, error)

            return make(stream, deserialize, handler.response_serializer)
        inner_unary = handler.stream_unary or handler.unary_unary

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                _check_decoded(request)
                with self._running():
                    return await inner_unary(request, context)
            except RpcError as error:
                await error.abort(context)
            except (grpc.aio.AbortError, asyncio.CancelledError):
                raise
            except Exception as error:
                await _abort_internal(context, method, error)

        return grpc.unary_unary_rpc_method_handler(unary, deserialize, handler.response_serializer)


def _decoded(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    """Decodes a message of a stream. Raises RpcError for the reader of the stream."""
    request = deserialize(data)
    _check_decoded(request)
    return request


def _check_decoded(request: Any) -> None:
    """Raises RpcError INTERNAL, the status of gRPC for bytes that cannot be decoded."""
    if isinstance(request, Undecodable):
        raise RpcError(grpc.StatusCode.INTERNAL, request.reason)


async def _abort_internal(context: grpc.aio.ServicerContext, method: str, error: Exception) -> None:
    logger.error("unexpected error in %s", method, exc_info=error)
    await RpcError(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}").abort(context)

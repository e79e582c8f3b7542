"""Signs of life of a neighbour: answers of its health service, which its event loop sends."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.process.watchdog import Silence

PING_S = 1.0


class Pings:
    """Asks the health service of a neighbour while a stream to it is up."""

    def __init__(self, channel: grpc.aio.Channel, service: str, hang_timeout: float) -> None:
        """service: the full name of the service that must be ready. hang_timeout: seconds; 0: waits forever for an
        answer."""
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._request = health_pb2.HealthCheckRequest(service=service)
        self._timeout = hang_timeout
        self.is_serving = False  # in the last answer

    async def until_silent(self, received: Callable[[], bool], on_change: Callable[[], None]) -> str:
        """Waits until the neighbour has been silent for hang_timeout, and returns the reason to break its stream.

        received: returns whether any message has arrived since its last call. on_change: is called when `is_serving`
        may have changed.
        """
        silence = Silence(self._timeout or 4 * PING_S)
        steps = range(round(min(PING_S, silence.timeout / 4) / silence.step))
        while await self._is_answered(silence, received, on_change):
            for _ in steps:  # silence is also measured between two pings
                await asyncio.sleep(silence.step)
                if received():
                    silence.broken()
                else:
                    silence.lasts()
        return f"no sign of life for {self._timeout:g} s: it hangs"

    async def _is_answered(self, silence: Silence, received: Callable[[], bool], on_change: Callable[[], None]) -> bool:
        call = asyncio.ensure_future(self._ask())
        try:
            while not (await asyncio.wait({call}, timeout=silence.step))[0]:
                if received():
                    silence.broken()
                elif silence.lasts() and self._timeout:
                    return False
        finally:
            call.cancel()
            with suppress(asyncio.CancelledError):
                was_serving, self.is_serving = self.is_serving, await call
        silence.broken()
        if self.is_serving != was_serving:
            on_change()
        return True

    async def _ask(self) -> bool:
        try:
            answer = await self._stub.Check(self._request)
        except grpc.aio.AioRpcError as error:
            # A neighbour without such a service answers, too. The stream itself notices a broken connection.
            return error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

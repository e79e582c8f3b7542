"""Signs of life of a neighbour: answers of its health service, which come from its event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.process.watchdog import Silence

PING_S = 1.0


class Pings:
    """Asks a neighbour, for as long as a stream to it is up, how it is."""

    def __init__(self, channel: grpc.aio.Channel, service: str, hang_timeout: float) -> None:
        """service: full name of the one whose readiness matters. hang_timeout: seconds; 0 = ask how it is, but wait for
        an answer for ever."""
        self._stub = health_pb2_grpc.HealthStub(channel)
        self._request = health_pb2.HealthCheckRequest(service=service)
        self._timeout = hang_timeout
        self.is_serving = False  # as the neighbour last said

    async def until_silent(self, heard: Callable[[], bool], on_change: Callable[[], None]) -> str:
        """Returns why the neighbour is taken to hang: it has been silent for hang_timeout.

        heard: whether it has been heard of otherwise since the last call. on_change: `is_serving` may differ.
        """
        silence = Silence(self._timeout or 4 * PING_S)
        steps = range(round(min(PING_S, silence.timeout / 4) / silence.step))
        while await self._is_answered(silence, heard, on_change):
            for _ in steps:  # between two questions, it may be silent already
                await asyncio.sleep(silence.step)
                if heard():
                    silence.broken()
                else:
                    silence.lasts()
        return f"no sign of life for {self._timeout:g} s: it hangs"

    async def _is_answered(self, silence: Silence, heard: Callable[[], bool], on_change: Callable[[], None]) -> bool:
        call = asyncio.ensure_future(self._ask())
        try:
            while not (await asyncio.wait({call}, timeout=silence.step))[0]:
                if heard():
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
            # Who has no such service answers, too; of a broken connection the stream itself tells.
            return error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

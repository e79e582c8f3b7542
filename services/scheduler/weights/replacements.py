"""The replacements of weights that were asked for: one at a time, and each once, however often its call is repeated."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc

from pagewire.v1.admin_pb2 import ReplaceWeightsRequest, ReplaceWeightsResponse
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

MAX_ID_BYTES = 64
# Finished replacements with answers that are kept. A call is repeated within a minute, in which few can have finished.
_MAX_KEPT = 64


class Replacements:
    """Starts replacements, and knows the answers of the latest by the ids of their calls."""

    def __init__(self, replace: Callable[[ReplaceWeightsRequest], Awaitable[ReplaceWeightsResponse]]) -> None:
        self._replace = replace
        self._task: asyncio.Task[ReplaceWeightsResponse] | None = None  # the replacement under way
        self._callers: list[ReplaceWeightsRequest] = []  # that wait for it, the one that began it first
        self._answered: dict[str, tuple[ReplaceWeightsRequest, ReplaceWeightsResponse]] = {}

    async def answer(self, request: ReplaceWeightsRequest) -> ReplaceWeightsResponse:
        """Replaces weights, joins the replacement under way if it is the same, or returns the answer of the finished
        one with this id. The replacement continues if the caller disconnects.

        Raises:
            RpcError: it failed, other weights are being installed, or the id belongs to a call for other weights.
        """
        if request.request_id in self._answered:
            first, answer = self._answered[request.request_id]
            if first != request:
                what = f"request_id {request.request_id} is that of a call for other weights; use a new one"
                raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("request_id", what)])
            return answer
        if self._task is None:
            self._callers = [request]
            self._task = asyncio.create_task(self._run(request), name="replace weights")
            self._task.add_done_callback(_log_failure)
        elif _wish(request) != _wish(self._callers[0]):
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "other weights are already being installed; try again when that has finished",
            )
        else:
            self._callers.append(request)
        return await asyncio.shield(self._task)

    async def _run(self, request: ReplaceWeightsRequest) -> ReplaceWeightsResponse:
        try:
            answer = await self._replace(request)
            self._answered |= {one.request_id: (one, answer) for one in self._callers if one.request_id}
            for request_id in list(self._answered)[:-_MAX_KEPT]:
                del self._answered[request_id]
            return answer
        finally:
            self._task = None


def _wish(request: ReplaceWeightsRequest) -> ReplaceWeightsRequest:
    """Returns the request without its id."""
    wish = ReplaceWeightsRequest()
    wish.CopyFrom(request)
    wish.ClearField("request_id")
    return wish


def _log_failure(replacing: asyncio.Task[ReplaceWeightsResponse]) -> None:
    """Logs why a replacement failed, as its caller may have disconnected."""
    if not replacing.cancelled() and (error := replacing.exception()) is not None:
        logger.warning("the weights were not replaced: %s", error)

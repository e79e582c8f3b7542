"""Calls that change the model of all schedulers, as a tokenizer service offers them to operators."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.wire.admin import Neighbour, ReplaceWeights
from pagewire.wire.status import error_details
from pagewire.wire.status.rpc_error import RpcError

_Answer = TypeVar("_Answer")

# Attempts at a call that may be repeated: after each, its successor takes some seconds to start.
_ATTEMPTS, _PAUSE_S = 10, 1.0


class SleepBehind:
    """Puts the model of all schedulers to sleep, and wakes it. A call is repeated if its scheduler dies meanwhile: what
    is done already is not done again."""

    def __init__(self, behind: Callable[[], Sequence[Neighbour]]) -> None:
        """behind: returns the current neighbours."""
        self._behind = behind

    async def sleep(self, request: admin_pb2.SleepModelRequest) -> admin_pb2.SleepModelResponse:
        answers = await self._ask_all(lambda stub: stub.SleepModel(request))
        return admin_pb2.SleepModelResponse(num_executors=sum(answer.num_executors for answer in answers))

    async def wake(self, request: admin_pb2.WakeModelRequest) -> admin_pb2.WakeModelResponse:
        answers = await self._ask_all(lambda stub: stub.WakeModel(request))
        return admin_pb2.WakeModelResponse(num_executors=sum(answer.num_executors for answer in answers))

    async def _ask_all(self, call: Callable[[admin_pb2_grpc.AdminServiceStub], Awaitable[_Answer]]) -> list[_Answer]:
        """Asks all neighbours at the same time. Raises RpcError if one fails."""
        for attempt in range(1, _ATTEMPTS + 1):
            if neighbours := self._behind():
                answers = await asyncio.gather(*(_ask(one, call) for one in neighbours), return_exceptions=True)
                errors = [answer for answer in answers if isinstance(answer, BaseException)]
                lasting = [error for error in errors if not isinstance(error, _Broken)]
                if lasting:
                    raise lasting[0]
                if not errors:
                    return [answer for answer in answers if not isinstance(answer, BaseException)]
            if attempt < _ATTEMPTS:
                await asyncio.sleep(_PAUSE_S)
        raise RpcError(grpc.StatusCode.UNAVAILABLE, "no scheduler answers; try again later", retry_delay=_PAUSE_S)


class _Broken(Exception):
    """Raised when the connection broke during a call."""


async def _ask(neighbour: Neighbour, call: Callable[[admin_pb2_grpc.AdminServiceStub], Awaitable[_Answer]]) -> _Answer:
    """Asks one neighbour. Raises RpcError or _Broken."""
    try:
        return await call(admin_pb2_grpc.AdminServiceStub(neighbour.channel))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not error_details.is_of_service(error):
            raise _Broken from error
        raise RpcError.from_call(error) from error


def replace_behind(behind: Callable[[], Sequence[Neighbour]]) -> ReplaceWeights:
    """Returns an implementation that asks all services behind this one, at the same time."""

    async def replace(request: admin_pb2.ReplaceWeightsRequest) -> admin_pb2.ReplaceWeightsResponse:
        neighbours = behind()
        answers = await asyncio.gather(*(_replace_at(one, request) for one in neighbours), return_exceptions=True)
        done = [answer for answer in answers if isinstance(answer, admin_pb2.ReplaceWeightsResponse)]
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if not neighbours:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "no scheduler is available to replace weights; try again later")
        if not errors:
            return admin_pb2.ReplaceWeightsResponse(
                version=done[0].version,
                previous_version=done[0].previous_version,
                num_executors=sum(answer.num_executors for answer in done),
            )
        if done and isinstance(errors[0], RpcError):
            where = [one.address for one, answer in zip(neighbours, answers, strict=True) if answer in done]
            raise RpcError(
                errors[0].code,
                f"weights {done[0].version} are in use only at {', '.join(where)}: {errors[0].message}; repeat the"
                " request once this is fixed",
            )
        raise errors[0]

    return replace


async def _replace_at(
    neighbour: Neighbour, request: admin_pb2.ReplaceWeightsRequest
) -> admin_pb2.ReplaceWeightsResponse:
    """Asks one neighbour. Raises RpcError."""
    try:
        return await admin_pb2_grpc.AdminServiceStub(neighbour.channel).ReplaceWeights(request)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not error_details.is_of_service(error):
            raise RpcError(
                grpc.StatusCode.UNAVAILABLE,
                f"the connection to the scheduler broke ({error.details()}); check with GetStatus or /v1/status which"
                " weights are in use, and try again",
            ) from error
        raise RpcError.from_call(error) from error

"""Sleep and wake of a model: /v1/admin/models, and the routes of vLLM's API."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import grpc
from fastapi import APIRouter, Query, Request
from pydantic import ConfigDict, Field, model_validator
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.body import Body, ErrorResponse
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.models.line import ModelLine
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.operation.admin.route import AdminRoute
from pagewire.gateway.schema.field import field
from pagewire.gateway.schema.parameters import Parameters
from pagewire.telemetry.trace import NO_TRACE
from pagewire.v1.admin_pb2 import (
    SleepMode,
    SleepModelRequest,
    WakeModelRequest,
)
from pagewire.wire.model_names import not_served
from pagewire.wire.rpc import RpcError

router = APIRouter(route_class=AdminRoute, tags=["operation"])

Mode = Literal["wait", "keep", "abort"]
_MODES = {
    "wait": SleepMode.SLEEP_MODE_WAIT,
    "keep": SleepMode.SLEEP_MODE_KEEP,
    "abort": SleepMode.SLEEP_MODE_ABORT,
}
_LEVEL = (
    "1: the weights stay in host memory (CUDA) or packed on disk (CPU), for a quick wake. 2: they are dropped, and the "
    "wake reads them again."
)
_MODE = (
    "Running requests: wait until they end, keep them with their tokens until the wake, or abort them with these. "
    "Waiting requests go on waiting, except with abort."
)
ONE_MODEL = "A served model; unset: the first one."
_TAGS = Refused("the model sleeps and wakes as a whole")
_NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {"description": "There is no such model.", "content": openapi.content_of((ErrorResponse,))}
}


class SleepBody(Parameters):
    unsupported: ClassVar[Mapping[str, Refused]] = {}

    level: Annotated[int, Field(ge=1, le=2)] | None = field("executor", _LEVEL, 1)
    mode: Mode | None = field("scheduler", _MODE, "wait")

    @model_validator(mode="before")
    @classmethod
    def _of_nothing(cls, body: object) -> object:
        return {} if body is None else body  # a request without a body


class SleepQuery(Parameters):
    model_config = ConfigDict(strict=False)  # texts stand for values in a query

    unsupported: ClassVar[Mapping[str, Refused]] = {"tags": _TAGS}

    level: Annotated[int, Field(ge=1, le=2)] | None = field("executor", _LEVEL, 1)
    mode: Mode | None = field("scheduler", _MODE, "wait")
    model: str | None = field("gateway", ONE_MODEL)


class WakeQuery(Parameters):
    unsupported: ClassVar[Mapping[str, Refused]] = {"tags": _TAGS}

    model: str | None = field("gateway", ONE_MODEL)


class ModelQuery(Parameters):
    unsupported: ClassVar[Mapping[str, Refused]] = {}

    model: str | None = field("gateway", ONE_MODEL)


class ModelState(Body):
    """The model after the call. `level`: 0 = ready. `executors`: the number of those that are in this state."""

    object: Literal["model.state"]
    model: str
    state: Literal["ready", "asleep"]
    level: int
    executors: int


class IsSleeping(Body):
    is_sleeping: bool


@router.post("/v1/admin/models/{name:path}/sleep", responses=_NOT_FOUND)
async def sleep_model(request: Request, name: str, body: SleepBody) -> ModelState:
    """Puts a model to sleep, which gives its memory back, and answers when it sleeps. Requests that arrive later wait
    until it is woken, no longer than their deadline. It continues if the caller disconnects.

    Through gRPC: `pagewire.v1.AdminService/SleepModel`.
    """
    line, level = await _named(request, name), body.level or 1
    count = await _sleep(line, level, body.mode or "wait")
    return ModelState(object="model.state", model=name, state="asleep", level=level, executors=count)


@router.post("/v1/admin/models/{name:path}/wake", responses=_NOT_FOUND)
async def wake_model(request: Request, name: str) -> ModelState:
    """Wakes a model, and answers when it takes requests. If it cannot be loaded, waiting requests end with the reason.

    Through gRPC: `pagewire.v1.AdminService/WakeModel`.
    """
    count = await _wake(await _named(request, name))
    return ModelState(object="model.state", model=name, state="ready", level=0, executors=count)


@router.post("/sleep")
async def sleep(request: Request, query: Annotated[SleepQuery, Query()]) -> Response:
    """Puts a model to sleep in vLLM's API. By default, running requests end first: none is lost."""
    await _sleep(await MODELS.of(request).named_line(query.model), query.level or 1, query.mode or "wait")
    return Response()


@router.post("/wake_up")
async def wake_up(request: Request, query: Annotated[WakeQuery, Query()]) -> Response:
    """Wakes a model in vLLM's API."""
    await _wake(await MODELS.of(request).named_line(query.model))
    return Response()


@router.get("/is_sleeping")
async def is_sleeping(request: Request, query: Annotated[ModelQuery, Query()]) -> IsSleeping:
    """Reports whether a model sleeps, or is absent, in vLLM's API."""
    line = await MODELS.of(request).named_line(query.model)
    if line.told is None:
        await line.models()
    return IsSleeping(is_sleeping=line.state in ("asleep", "absent"))


async def _named(request: Request, name: str) -> ModelLine:
    """Returns the line of a model, which is no adapter. Raises ApiError 404."""
    models = MODELS.of(request)
    served = {one.model.id: one.line for one in await models.list_all() if not one.model.parent}
    if name not in served:
        raise ApiError(404, not_served(name, served), param="model", code="model_not_found")
    return served[name]


async def _sleep(line: ModelLine, level: int, mode: Mode) -> int:
    """Returns the number of executors that sleep. Raises ApiError."""
    if line.state in ("absent", "loading") and line.told is not None:
        raise ApiError(409, f"{line.name} is {line.state}: only a model in memory can be put to sleep")
    tokenizer, wanted = line.client, SleepModelRequest(level=level, mode=_MODES[mode])
    with _refused():
        answer = await tokenizer.call_to_its_end(tokenizer.admin.SleepModel, wanted, NO_TRACE, computes=False)
    return answer.num_executors


async def _wake(line: ModelLine) -> int:
    """Returns the number of executors that are awake. Raises ApiError."""
    tokenizer = line.client
    await line.load()  # a stack first makes room
    with _refused():
        answer = await tokenizer.call_to_its_end(
            tokenizer.admin.WakeModel, WakeModelRequest(), NO_TRACE, computes=False
        )
    return answer.num_executors


@contextmanager
def _refused() -> Iterator[None]:
    """Raises ApiError for the error of a call."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
            raise ApiError(409, error.details() or error.code().name) from error
        raise from_rpc(RpcError.from_call(error)) from error

"""Adding and deleting models while others serve: /v1/admin/models."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import grpc
import msgspec
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.body import ErrorResponse
from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.core.request_context import time_left
from pagewire.gateway.models.bodies import Model
from pagewire.gateway.models.entries import entry_of
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.models.stack import Stack
from pagewire.gateway.operation.admin.route import AdminRoute
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.parameters import Parameters
from pagewire.v1.lines_pb2 import DeleteLineRequest, PutLineRequest
from pagewire.wire.rpc import RpcError

router = APIRouter(route_class=AdminRoute, tags=["operation"])

NO_STACK = (
    "this gateway finds its models by --tokenizer-discovery and cannot add or delete any: start or stop the services "
    "of the model, or use `pagewire serve`"
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    409: {"description": "The state of the server forbids it.", "content": openapi.content_of((ErrorResponse,))}
}
_PUT = {200: openapi.response(Model), 201: openapi.response(Model)} | _ERRORS
_DELETED = _ERRORS | {404: {"description": "There is no such model.", "content": openapi.content_of((ErrorResponse,))}}


class ModelBody(Parameters):
    """A model, as in a file of `pagewire serve --models`."""

    unsupported: ClassVar[Mapping[str, Refused]] = {"name": Refused("the path names the model")}

    model: Annotated[str, Field(min_length=1)] = required(
        "gateway", "A directory, a `.gguf` file, a hub id or a name from PyPI, as `--model`."
    )
    aliases: list[Annotated[str, Field(min_length=1)]] | None = field("gateway", "Further names for requests.")
    pinned: bool | None = field("gateway", "Load it now and keep it in memory; else its first request loads it.", False)
    memory: Annotated[int | str, Field(union_mode="left_to_right")] | None = field(
        "gateway", "What it takes of `--models-memory`: bytes, or a size such as `2GiB`. Unset: it is measured."
    )
    idle_timeout: Annotated[float, Field(ge=0)] | None = field(
        "gateway", "Seconds without requests after which it sleeps; 0: never. Unset: `--idle-timeout`."
    )
    flags: dict[str, Any] | None = field("gateway", 'Flags of its own, such as `{"max-model-len": 4096}`.')


@router.put("/v1/admin/models/{name:path}", responses=_PUT)
async def put_model(request: Request, name: str, body: ModelBody) -> Response:
    """Adds a model, with status 201; 200 if it is there already, with the same settings. Unless it is `pinned`, its
    first request loads it."""
    stack = _stack(request)
    settings = msgspec.json.encode(body.model_dump(exclude_none=True)).decode()
    try:
        put = await stack.calls.PutLine(PutLineRequest(name=name, settings_json=settings), timeout=time_left())
    except grpc.aio.AioRpcError as error:
        raise api_error(error) from error
    await MODELS.of(request).learned(put.line.name, exists=True)
    return json_response(entry_of(put.line), 201 if put.created else 200)


@router.delete("/v1/admin/models/{name:path}", status_code=204, responses=_DELETED)
async def delete_model(request: Request, name: str) -> Response:
    """Ends a model once its running requests have ended, and forgets it. It continues if the caller disconnects."""
    try:
        await _stack(request).calls.DeleteLine(DeleteLineRequest(name=name), timeout=time_left())
    except grpc.aio.AioRpcError as error:
        raise api_error(error) from error
    await MODELS.of(request).learned(name, exists=False)
    return Response(status_code=204)


def _stack(request: Request) -> Stack:
    """Raises ApiError 409 if there is none."""
    stack = MODELS.of(request).stack
    if stack is None:
        raise ApiError(409, NO_STACK)
    return stack


def api_error(error: grpc.aio.AioRpcError) -> ApiError:
    if error.code() in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
        return ApiError(409, error.details() or error.code().name)
    return from_rpc(RpcError.from_call(error))

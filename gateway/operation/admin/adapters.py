"""Loading and unloading LoRA adapters while requests run: /v1/admin/adapters, and the routes of vLLM's API."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import grpc
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.body import Body, ErrorResponse
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.operation.admin.route import AdminRoute
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.parameters import Parameters
from pagewire.telemetry.trace import NO_TRACE
from pagewire.v1.admin_pb2 import AdminServiceLoadAdapterRequest, AdminServiceUnloadAdapterRequest
from pagewire.v1.common_pb2 import Adapter
from pagewire.wire.rpc import RpcError

router = APIRouter(route_class=AdminRoute, tags=["operation"])

_PATH = "A directory or file that the executors can read."
_MODEL = "The served model that it adapts; unset: the first one."
_NAMES = {"name": "lora_name", "path": "lora_path"}  # of vLLM's bodies
_NOT_FOUND: dict[int | str, dict[str, Any]] = {
    404: {"description": "There is no such adapter.", "content": openapi.content_of((ErrorResponse,))}
}


class AdapterBody(Parameters):
    unsupported: ClassVar[Mapping[str, Refused]] = {}

    path: Annotated[str, Field(min_length=1)] = required("executor", _PATH)
    model: str | None = field("gateway", _MODEL)
    replaces: bool | None = field(
        "scheduler", "It may replace an adapter of the same name; running requests finish with that one.", False
    )


class ServedAdapter(Body):
    """A loaded adapter. `digest`: of its contents; its first 12 digits are in `system_fingerprint`."""

    object: Literal["adapter"]
    name: str
    path: str
    digest: str
    rank: int
    base_model: str  # that it was trained for, as its files say


class LoadLoraBody(Parameters):
    """An adapter to load, as vLLM's clients name it."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "is_3d_lora_weight": Refused("the form of the weights is detected", (False,)),
    }

    lora_name: Annotated[str, Field(min_length=1)] = required("scheduler", "The name for requests.")
    lora_path: Annotated[str, Field(min_length=1)] = required("executor", _PATH)
    model: str | None = field("gateway", _MODEL)
    load_inplace: bool | None = field("scheduler", "As `replaces` of `/v1/admin/adapters`.", False)


class UnloadLoraBody(Parameters):
    """An adapter to unload, as vLLM's clients name it."""

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    lora_name: Annotated[str, Field(min_length=1)] = required("scheduler", "The name for requests.")
    lora_int_id: int | None = field("scheduler", "Ignored.")


@router.put("/v1/admin/adapters/{name:path}")
async def load_adapter(request: Request, name: str, body: AdapterBody) -> ServedAdapter:
    """Loads an adapter on all executors, so that requests can name it as their model; a repetition changes nothing.

    Through gRPC: `pagewire.v1.AdminService/LoadAdapter`.
    """
    wanted = AdminServiceLoadAdapterRequest(name=name, path=body.path, replaces=bool(body.replaces))
    return _served(await _load((await MODELS.of(request).named_line(body.model)).client, wanted))


@router.get("/v1/admin/adapters/{name:path}", responses=_NOT_FOUND)
async def get_adapter(request: Request, name: str) -> ServedAdapter:
    """Describes an adapter; one in `--lora-dir` is loaded."""
    return _served(await _load(await _adapted(request, name), AdminServiceLoadAdapterRequest(name=name)))


@router.delete("/v1/admin/adapters/{name:path}", status_code=204, responses=_NOT_FOUND)
async def unload_adapter(request: Request, name: str) -> Response:
    """Takes the name of an adapter from later requests; running requests finish with it.

    Through gRPC: `pagewire.v1.AdminService/UnloadAdapter`.
    """
    await _unload(await _adapted(request, name), name)
    return Response(status_code=204)


@router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
async def load_lora_adapter(request: Request, body: LoadLoraBody) -> Response:
    """Loads an adapter in vLLM's API."""
    request_context(request.scope).names = _NAMES
    wanted = AdminServiceLoadAdapterRequest(name=body.lora_name, path=body.lora_path, replaces=bool(body.load_inplace))
    await _load((await MODELS.of(request).named_line(body.model)).client, wanted, conflict=400)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
async def unload_lora_adapter(request: Request, body: UnloadLoraBody) -> Response:
    """Takes the name of an adapter from later requests in vLLM's API."""
    request_context(request.scope).names = _NAMES
    await _unload(await _adapted(request, body.lora_name), body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _served(adapter: Adapter) -> ServedAdapter:
    return ServedAdapter(
        object="adapter",
        name=adapter.name,
        path=adapter.path,
        digest=adapter.digest,
        rank=adapter.rank,
        base_model=adapter.base_model,
    )


async def _adapted(request: Request, name: str) -> TokenizerClient:
    """Returns the services of the model that an adapter of this name adapts; if none is known, of the first model."""
    models = MODELS.of(request)
    lines = [one.line for one in await models.list_all() if one.model.parent and one.model.id == name]
    return (lines[0] if lines else models.default()).client


async def _load(tokenizer: TokenizerClient, wanted: AdminServiceLoadAdapterRequest, conflict: int = 409) -> Adapter:
    """Loads an adapter, or finds it. conflict: the status if the state of the service forbids it. Raises ApiError."""
    try:
        return (await tokenizer.call_to_its_end(tokenizer.admin.LoadAdapter, wanted, NO_TRACE)).adapter
    except grpc.aio.AioRpcError as error:
        raise _api_error(error, conflict) from error


async def _unload(tokenizer: TokenizerClient, name: str) -> None:
    """Raises ApiError."""
    wanted = AdminServiceUnloadAdapterRequest(name=name)
    try:
        await tokenizer.call_to_its_end(tokenizer.admin.UnloadAdapter, wanted, NO_TRACE)
    except grpc.aio.AioRpcError as error:
        raise _api_error(error, 409) from error


def _api_error(error: grpc.aio.AioRpcError, conflict: int) -> ApiError:
    if error.code() in (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.FAILED_PRECONDITION):
        return ApiError(conflict, error.details() or error.code().name)
    if error.code() is grpc.StatusCode.NOT_FOUND:
        return ApiError(404, error.details() or error.code().name, code="adapter_not_found")
    return from_rpc(RpcError.from_call(error))

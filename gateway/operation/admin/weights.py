"""Replacing weights while requests run: POST /v1/admin/weights, and SGLang's route."""

import asyncio
import uuid
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import grpc
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.body import Body, ErrorResponse
from pagewire.gateway.core.encoding import encode, json_response
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.core.request_context import time_left
from pagewire.gateway.models.line import ModelLine
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.operation.admin.route import AdminRoute
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.parameters import Parameters
from pagewire.v1.admin_pb2 import ReplaceWeightsRequest, ReplaceWeightsResponse
from pagewire.wire.rpc import RpcError
from pagewire.wire.status import error_details

router = APIRouter(route_class=AdminRoute, tags=["operation"])

_PATTERN = r"^[A-Za-z0-9._:+-]{1,64}$"
_STATUSES = {grpc.StatusCode.FAILED_PRECONDITION: 409, grpc.StatusCode.RESOURCE_EXHAUSTED: 507}
# Seconds before the same is asked again of a tokenizer service that has died, or of its successor.
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)


class WeightsBody(Parameters):
    """The weights that replace the present ones. Architecture, shapes, quantization, end tokens, tokenizer and chat
    template stay the same."""

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    model: Annotated[str, Field(min_length=1)] = required(
        "executor", "A directory, a `.gguf` file or a hub id that the executors can read, as `--model`."
    )
    revision: str | None = field("executor", "Branch, tag or commit of a hub id.")
    served_model_name: str | None = field("gateway", "The served model that gets them; unset: the first one.")
    version: str | None = field(
        "scheduler",
        "The name of the weights in answers (`system_fingerprint`). Unset: a digest of the files.",
        pattern=_PATTERN,
    )
    max_wait_seconds: Annotated[float, Field(ge=0)] | None = field(
        "scheduler",
        "Running requests continue with the old weights for this long, then end with an error. Unset: until they "
        "finish.",
    )


class ReplacedWeights(Body):
    """The new weights. `executors`: the number of executors that have them."""

    object: Literal["weights"]
    version: str
    previous_version: str
    executors: int


class DiskWeightsBody(Parameters):
    """SGLang's body."""

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "manifest": Refused("weights are safetensors or GGUF files"),
    }

    model_path: Annotated[str, Field(min_length=1)] = required("executor", "As `model` of `/v1/admin/weights`.")
    load_format: Literal["auto", "safetensors", "gguf"] | None = field("executor", "Ignored: the format is detected.")
    weight_version: str | None = field("scheduler", "As `version` of `/v1/admin/weights`.", pattern=_PATTERN)
    abort_all_requests: bool | None = field("scheduler", "As `max_wait_seconds: 0`.", False)
    is_async: bool | None = field("scheduler", "Ignored.")
    torch_empty_cache: bool | None = field("executor", "Ignored.")
    keep_pause: Literal[False] | None = field("scheduler", "Not supported: requests continue afterwards.")
    recapture_cuda_graph: bool | None = field("executor", "Ignored: graphs read the new weights.")
    token_step: int | None = field("scheduler", "Ignored.")
    flush_cache: bool | None = field("scheduler", "Ignored: cached blocks are never used with other weights.")


class DiskWeightsAnswer(Body):
    success: bool
    message: str
    num_paused_requests: int = 0


@router.post("/v1/admin/weights")
async def replace_weights(request: Request, body: WeightsBody) -> ReplacedWeights:
    """Replaces the weights of all executors, and answers when all have the new ones. No request is lost: running
    requests finish with the old weights, others wait or run elsewhere. It continues if the caller disconnects.

    Through gRPC: `pagewire.v1.AdminService/ReplaceWeights`.
    """
    wanted = ReplaceWeightsRequest(
        model=body.model,
        revision=body.revision or "",
        version=body.version or "",
        max_wait_seconds=body.max_wait_seconds,
    )
    replaced = await _replace(await MODELS.of(request).named_line(body.served_model_name), wanted)
    return ReplacedWeights(
        object="weights",
        version=replaced.version,
        previous_version=replaced.previous_version,
        executors=replaced.num_executors,
    )


_FAILED = {
    "description": "The weights stay the same.",
    "content": openapi.content_of((DiskWeightsAnswer, ErrorResponse)),
}


@router.post("/update_weights_from_disk", responses={200: openapi.response(DiskWeightsAnswer), 400: _FAILED})
async def update_weights_from_disk(request: Request, body: DiskWeightsBody) -> Response:
    """Replaces weights in SGLang's API; a failure is status 400 with `success: false`."""
    wanted = ReplaceWeightsRequest(model=body.model_path, version=body.weight_version or "")
    if body.abort_all_requests:
        wanted.max_wait_seconds = 0
    try:
        replaced = await _replace(await MODELS.of(request).find(None), wanted)
    except ApiError as error:
        failed = encode(DiskWeightsAnswer(success=False, message=error.message))
        return Response(failed, status_code=400, media_type="application/json")
    return json_response(DiskWeightsAnswer(success=True, message=f"weights {replaced.version} are in force"))


async def _replace(line: ModelLine, wanted: ReplaceWeightsRequest) -> ReplaceWeightsResponse:
    """Asks again when the tokenizer service dies meanwhile, as the replacement goes on: by its id, the scheduler knows
    it again. Raises ApiError."""
    wanted.request_id = uuid.uuid4().hex
    await line.reach(computes=True)
    for pause in (*_PAUSES_S, None):
        try:
            return await line.client.admin.ReplaceWeights(wanted, timeout=time_left())
        except grpc.aio.AioRpcError as error:
            is_broken = error.code() is grpc.StatusCode.UNAVAILABLE and not error_details.is_of_service(error)
            if not is_broken or pause is None:
                if error.code() in _STATUSES:
                    raise ApiError(_STATUSES[error.code()], error.details() or error.code().name) from error
                raise from_rpc(RpcError.from_call(error)) from error
        await asyncio.sleep(pause)
    raise AssertionError("the last attempt returns or raises")

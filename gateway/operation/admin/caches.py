"""Resetting the prefix cache, in vLLM's API and in SGLang's."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import grpc
from fastapi import APIRouter, Query, Request
from pydantic import ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.operation.admin.route import AdminRoute
from pagewire.gateway.operation.admin.sleep import ONE_MODEL
from pagewire.gateway.schema.field import field
from pagewire.gateway.schema.parameters import Parameters
from pagewire.telemetry.trace import NO_TRACE
from pagewire.v1.admin_pb2 import ResetPrefixCacheRequest, ResetPrefixCacheResponse
from pagewire.wire.rpc import RpcError

router = APIRouter(route_class=AdminRoute, tags=["operation"])


class ResetQuery(Parameters):
    model_config = ConfigDict(strict=False)  # texts stand for values in a query

    unsupported: ClassVar[Mapping[str, Refused]] = {
        "reset_running_requests": Refused(
            "running requests keep their blocks, which later requests do not find", ("false", "False", "0")
        ),
    }

    model: str | None = field("gateway", ONE_MODEL)
    reset_external: bool | None = field("scheduler", "Ignored: copies in host memory and on disk are always forgotten.")


class FlushQuery(Parameters):
    model_config = ConfigDict(strict=False)

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    model: str | None = field("gateway", ONE_MODEL)
    timeout: Annotated[float, Field(ge=0)] | None = field("scheduler", "Ignored: running requests are not waited for.")


class ResetCache(Body):
    """`blocks`: the number of blocks that were forgotten, over all groups of layers. `executors`: those that did."""

    success: Literal[True]
    blocks: int
    executors: int


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request, query: Annotated[ResetQuery, Query()]) -> ResetCache:
    """Forgets all cached prefixes in vLLM's API. Running requests keep theirs; no later request finds what was computed
    before.

    Through gRPC: `pagewire.v1.AdminService/ResetPrefixCache`.
    """
    await _refuse_body(request, "reset_external=true")
    forgotten = await _reset((await MODELS.of(request).named_line(query.model)).client)
    return ResetCache(success=True, blocks=forgotten.num_blocks, executors=forgotten.num_executors)


@router.get("/flush_cache", response_class=PlainTextResponse)
@router.post("/flush_cache", response_class=PlainTextResponse)
async def flush_cache(request: Request, query: Annotated[FlushQuery, Query()]) -> Response:
    """Forgets all cached prefixes in SGLang's API, also while requests run."""
    await _refuse_body(request, "timeout=5")
    forgotten = await _reset((await MODELS.of(request).named_line(query.model)).client)
    return PlainTextResponse(
        f"Cache flushed.\nBlocks forgotten: {forgotten.num_blocks}, executors: {forgotten.num_executors}.\n"
    )


async def _refuse_body(request: Request, example: str) -> None:
    """Raises ApiError for a body that says anything. example: of a query."""
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        what = f"{request.url.path} takes no body; leave it out, and give parameters in the query, as in ?{example}"
        raise ApiError(400, what)


async def _reset(tokenizer: TokenizerClient) -> ResetPrefixCacheResponse:
    """Raises ApiError."""
    try:
        return await tokenizer.call_to_its_end(
            tokenizer.admin.ResetPrefixCache, ResetPrefixCacheRequest(), NO_TRACE, computes=False
        )
    except grpc.aio.AioRpcError as error:
        raise from_rpc(RpcError.from_call(error)) from error

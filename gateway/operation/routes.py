"""Routes for operators, with vLLM's and SGLang's names."""

import re

from fastapi import APIRouter, Request
from msgspec import UNSET

from pagewire import __version__
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.models.every_service import call_each
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.operation.bodies import (
    AbortBody,
    Aborted,
    Health,
    ServedModel,
    ServerInfo,
    ServerLoad,
    TokenizerInfo,
    Version,
)
from pagewire.gateway.operation.readiness import READINESS
from pagewire.gateway.operation.status.routes import FRESH_S
from pagewire.gateway.operation.status.source import STATUS
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire import tenants

router = APIRouter(route_class=JsonRoute, tags=["operation"])

# Prefixes of the ids of answers.
_PREFIX = re.compile(r"(chatcmpl-|cmpl-|msg_|resp_)")
# The prompt of the end-to-end probe.
_TEXT = "Hi"


@router.post("/abort_requests")
@router.post("/inference/v1/abort_requests")
@router.post("/abort_request")
async def abort_requests(request: Request, body: AbortBody) -> Aborted:
    """Aborts generations of any gateway: those of the tenant; with an admin key or without tenants, all."""
    ids = [name for given in body.ids for name in (given, _PREFIX.sub("", given, count=1))]
    upstream = inference_pb2.AbortRequestsRequest(request_ids=ids, all=bool(body.abort_all))
    metadata = tenants.metadata() if tenants.caller_scope() is not None else []

    async def abort(tokenizer: TokenizerClient) -> int:
        answers = await call_each(tokenizer, lambda stub: stub.AbortRequests, upstream, metadata)
        return sum(answer.num_aborted for answer in answers)

    return Aborted(status="aborted", aborted=await MODELS.of(request).sum_of(abort))


@router.get("/load")
async def load(request: Request) -> ServerLoad:
    return ServerLoad(server_load=await MODELS.of(request).sum_of(_num_requests))


@router.get("/server_info")
@router.get("/get_server_info", include_in_schema=False)
async def server_info(request: Request) -> ServerInfo:
    models = MODELS.of(request)
    served = [one.model for one in await models.list_all()]
    return ServerInfo(
        version=__version__,
        model_path=served[0].root,
        served_model_names=[model.id for model in served],
        is_generation=_generates(served[0]),
        max_model_len=served[0].max_model_len or None,
        num_requests=await models.sum_of(_num_requests),
    )


@router.get("/model_info")
@router.get("/get_model_info", include_in_schema=False)
async def model_info(request: Request) -> ServedModel:
    model = (await MODELS.of(request).list_all())[0].model
    replicas = (await STATUS.of(request).status(FRESH_S)).replicas
    return ServedModel(
        weight_version=next((one.weights_version for one in replicas if one.weights_version), "default"),
        model_path=model.root,
        tokenizer_path=model.root,
        is_generation=_generates(model),
        served_model_name=model.id,
        max_model_len=model.max_model_len or None,
    )


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> TokenizerInfo:
    """Returns the chat template and special tokens; only with `--enable-tokenizer-info-endpoint`."""
    tokenizer = await MODELS.of(request).client(None)
    info = await tokenizer.call(tokenizer.inference.GetTokenizerInfo, inference_pb2.GetTokenizerInfoRequest())
    return TokenizerInfo(
        chat_template=info.chat_template if info.HasField("chat_template") else UNSET,
        tool_chat_template=info.tool_chat_template if info.HasField("tool_chat_template") else UNSET,
        vocab_size=info.vocab_size,
        model_max_length=info.max_model_len or None,
        special_tokens=dict(info.special_tokens),
    )


@router.get("/health_generate")
async def health_generate(request: Request) -> Health:
    """Generates a token or a vector, and reports whether that works. It waits in the queue like any request."""
    if reason := await READINESS.of(request).why_not():
        raise ApiError(503, reason)
    tokenizer = await MODELS.of(request).client(None)
    await _compute(tokenizer, (await tokenizer.list_models())[0].kind)
    return Health(status="ok")


async def _compute(tokenizer: TokenizerClient, kind: common_pb2.ModelKind) -> None:
    inputs = [inference_pb2.InputText(text=_TEXT)]
    if kind == common_pb2.MODEL_KIND_EMBED:
        await tokenizer.call(tokenizer.inference.Embed, inference_pb2.EmbedRequest(inputs=inputs))
    elif kind == common_pb2.MODEL_KIND_CLASSIFY:
        await tokenizer.call(tokenizer.inference.Classify, inference_pb2.ClassifyRequest(inputs=inputs))
    else:
        params = common_pb2.SamplingParams(max_tokens=1, ignore_eos=True)
        call = tokenizer.inference.Generate(inference_pb2.GenerateRequest(text=_TEXT, sampling_params=params))
        async for _ in call:
            pass


async def _num_requests(tokenizer: TokenizerClient) -> int:
    counted = await call_each(tokenizer, lambda stub: stub.CountRequests, inference_pb2.CountRequestsRequest())
    return sum(one.num_requests for one in counted)


def _generates(model: inference_pb2.Model) -> bool:
    return model.kind == common_pb2.MODEL_KIND_UNSPECIFIED


@router.get("/version")
async def version(request: Request) -> Version:
    """Returns the version of Pagewire."""
    return Version(version=__version__)

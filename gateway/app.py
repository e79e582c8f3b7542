"""The REST application: its routes, and what they share."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc
from fastapi import APIRouter, FastAPI, Request
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.responses import PlainTextResponse, Response

from pagewire import __version__, rpc, telemetry
from pagewire.config import GatewayConfig
from pagewire.gateway import metrics, openapi
from pagewire.gateway.answer import Head
from pagewire.gateway.chat import ChatAnswer
from pagewire.gateway.completions import CompletionAnswer
from pagewire.gateway.encoding import json_response
from pagewire.gateway.errors import ApiError, install_handlers
from pagewire.gateway.json_route import JsonRoute
from pagewire.gateway.middleware import GracefulShutdown, RequestMiddleware, request_context
from pagewire.gateway.schema.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationParameters,
    TokenizeRequest,
)
from pagewire.gateway.schema.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DetokenizeResponse,
    Health,
    Model,
    ModelList,
    TokenizeResponse,
    Version,
)
from pagewire.gateway.serving import GenerationResponse
from pagewire.gateway.tokenizer_link import TokenizerLink
from pagewire.gateway.translate import chat_requests, completion_requests, tokenize_request
from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

CALL_TIMEOUT_S = 60.0
# For a tokenizer service that is away: as long as it takes to start again, and less than clients wait.
AWAY_TIMEOUT_S = 10.0
PROBE_TIMEOUT_S = 2.0

Answered = TypeVar("Answered")

router = APIRouter(route_class=JsonRoute)


class Gateway:
    """What the routes share: the way to the tokenizer service."""

    def __init__(self, config: GatewayConfig) -> None:
        self.shutdown = GracefulShutdown()
        self.channel = rpc.channel(config.tokenizer_address)
        self.link = TokenizerLink(self.channel, config.recovery_timeout)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)
        self._default_model = ""

    async def default_model(self) -> str:
        """The first served name: what an answer says when the request named no model."""
        if not self._default_model:
            self._default_model = (await self.list_models())[0].id
        return self._default_model

    async def list_models(self) -> Sequence[inference_pb2.Model]:
        return (await self.call(self.inference.ListModels, inference_pb2.ListModelsRequest())).models

    async def call(self, method: Callable[..., Awaitable[Answered]], request: object) -> Answered:
        """A unary call to the tokenizer service; it waits for one that is away for a moment.

        Raises grpc.aio.AioRpcError, or ApiError 503 if the service did not come back.
        """
        if self.link.is_up or not self.link.is_available:
            return await method(request, timeout=CALL_TIMEOUT_S)
        try:
            return await method(request, timeout=AWAY_TIMEOUT_S, wait_for_ready=True)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not self.link.is_up:
                raise ApiError(503, "the tokenizer service cannot be reached; try again") from error
            raise

    async def why_not_ready(self) -> str:
        """Why the line cannot serve; "" if it can."""
        if self.shutdown.begun:
            return "this gateway is shutting down"
        request = health_pb2.HealthCheckRequest(service="pagewire.v1.InferenceService")
        try:
            health = await self._health.Check(request, timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return f"the tokenizer service does not answer: {error.code().name}: {error.details()}"
        if not self.link.is_up:
            return "the stream to the tokenizer service is not up yet"
        if health.status != health_pb2.HealthCheckResponse.SERVING:
            return "the tokenizer service is up, but what is behind it is not ready: still loading, or restarting"
        return ""

    async def metrics(self) -> bytes:
        """Metrics of every service that answers."""
        services = [admin_pb2.ServiceMetrics(service="gateway", exposition=telemetry.exposition())]
        try:
            behind = await self._admin.GetMetrics(admin_pb2.GetMetricsRequest(), timeout=2 * PROBE_TIMEOUT_S)
            services.extend(behind.services)
        except grpc.aio.AioRpcError as error:
            metrics.logger.debug("no metrics from behind the gateway: %s", error.details())
        # Parsing a few thousand lines takes longer than a token may wait.
        return await asyncio.to_thread(metrics.merge, services)


def create_app(config: GatewayConfig, gateway: Gateway) -> FastAPI:
    app = openapi.DocumentedApp(
        title="Pagewire", version=__version__, description=openapi.DESCRIPTION, responses=openapi.ERROR_RESPONSES
    )
    app.state.gateway = gateway
    app.add_middleware(RequestMiddleware, api_key=config.api_key, shutdown=gateway.shutdown)
    install_handlers(app)
    app.include_router(router)
    return app


def _gateway(request: Request) -> Gateway:
    gateway: Gateway = request.app.state.gateway
    return gateway


async def _head(request: Request, body: GenerationParameters, prefix: str) -> Head:
    context = request_context(request.scope)
    if body.request_id is not None and "x-request-id" not in request.headers:
        context.request_id = body.request_id
    model = body.model or await _gateway(request).default_model()
    return Head(id=f"{prefix}-{context.request_id}", created=int(time.time()), model=model)


@router.post(
    "/v1/chat/completions",
    tags=["generation"],
    responses=openapi.generation_responses(ChatCompletion, ChatCompletionChunk),
)
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """The next turn of a conversation; with `stream: true` as server-sent events."""
    answer = ChatAnswer(body, await _head(request, body, "chatcmpl"))
    return GenerationResponse(_gateway(request).link, body, chat_requests(body), answer)


@router.post(
    "/v1/completions",
    tags=["generation"],
    responses=openapi.generation_responses(Completion, CompletionChunk),
)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """What follows each prompt (text or token ids, one or several); with `stream: true` as server-sent events."""
    answer = CompletionAnswer(body, await _head(request, body, "cmpl"))
    return GenerationResponse(_gateway(request).link, body, completion_requests(body), answer)


@router.get("/v1/models", tags=["models"])
async def list_models(request: Request) -> ModelList:
    return ModelList(data=[_model(model) for model in await _gateway(request).list_models()])


@router.get("/v1/models/{model:path}", tags=["models"])
async def retrieve_model(request: Request, model: str) -> Model:
    models = await _gateway(request).list_models()
    for served in models:
        if served.id == model:
            return _model(served)
    names = ", ".join(served.id for served in models)
    raise ApiError(404, f"no model {model!r}; served: {names}", param="model", code="model_not_found")


def _model(model: inference_pb2.Model) -> Model:
    return Model(id=model.id, created=model.created, root=model.root, max_model_len=model.max_model_len or None)


@router.post("/tokenize", tags=["tokens"])
async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeResponse:
    """Text or messages to token ids, exactly as a completion would see them."""
    gateway = _gateway(request)
    answer = await gateway.call(gateway.inference.Tokenize, tokenize_request(body))
    return TokenizeResponse(
        count=len(answer.token_ids),
        max_model_len=answer.max_model_len,
        tokens=list(answer.token_ids),
        token_strs=list(answer.token_strs) if body.return_token_strs else None,
    )


@router.post("/detokenize", tags=["tokens"])
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
    """Token ids to text."""
    upstream = inference_pb2.DetokenizeRequest(model=body.model or "", token_ids=body.tokens)
    gateway = _gateway(request)
    return DetokenizeResponse(prompt=(await gateway.call(gateway.inference.Detokenize, upstream)).text)


@router.get("/livez", tags=["operation"])
async def livez(request: Request) -> Health:
    """Whether this process runs. Needs no key."""
    return Health(status="ok")


_READY: openapi.Responses = {
    200: openapi.response(Health, "Ready."),
    503: openapi.response(Health, "Not ready; `reason` says why."),
}


@router.get("/health", tags=["operation"], responses=_READY)
@router.get("/readyz", tags=["operation"], responses=_READY)
async def ready(request: Request) -> Response:
    """Whether a request would be served, by the whole line. Needs no key."""
    if reason := await _gateway(request).why_not_ready():
        return json_response(Health(status="unavailable", reason=reason), 503)
    return json_response(Health(status="ok"))


@router.get("/version", tags=["operation"])
async def version(request: Request) -> Version:
    return Version(version=__version__)


@router.get("/metrics", tags=["operation"], response_class=PlainTextResponse)
async def get_metrics(request: Request) -> Response:
    """Prometheus metrics of all services."""
    return Response(await _gateway(request).metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

"""The REST applications, and the routes of models and tokens; every API has a folder."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from pagewire import __version__
from pagewire.config import GatewayConfig
from pagewire.gateway.admin import routes as admin_routes
from pagewire.gateway.batches import routes as batch_routes
from pagewire.gateway.core import openapi
from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.errors import ApiError, install_handlers
from pagewire.gateway.core.gateway import Gateway, gateway_of
from pagewire.gateway.core.json_route import JsonRoute
from pagewire.gateway.core.middleware import MAX_BODY_BYTES, RequestMiddleware
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.explain import routes as explain_routes
from pagewire.gateway.files import routes as files_routes
from pagewire.gateway.generation import routes as generation_routes
from pagewire.gateway.generation.translate import tokenize_requests
from pagewire.gateway.messages import routes as messages_routes
from pagewire.gateway.messages.models import model_info, model_page
from pagewire.gateway.messages.responses import ModelInfo, ModelPage
from pagewire.gateway.operation import probes, unserved
from pagewire.gateway.operation import routes as operation_routes
from pagewire.gateway.page.routes import add_page
from pagewire.gateway.responses import routes as responses_routes
from pagewire.gateway.schema.requests import DetokenizeRequest, TokenizeRequest
from pagewire.gateway.schema.responses import (
    DetokenizeResponse,
    Model,
    ModelList,
    TokenizeResponse,
    Version,
)
from pagewire.gateway.sglang import routes as sglang_routes
from pagewire.gateway.vectors import routes as vectors_routes
from pagewire.v1 import inference_pb2
from pagewire.wire.addresses import is_loopback

router = APIRouter(route_class=JsonRoute)


def create_app(config: GatewayConfig, gateway: Gateway) -> FastAPI:
    """What --port serves: everything but what --admin-port has, where there is one."""
    app = with_routes(for_operators=config.admin_port is None)
    return _served(app, config, gateway, host=config.host)


def create_admin_app(config: GatewayConfig, gateway: Gateway) -> FastAPI:
    """What --admin-port serves."""
    app = FastAPI(title="Pagewire", docs_url=None, redoc_url=None, openapi_url=None)
    for one in (*admin_routes.ROUTERS, probes.router):
        app.include_router(one)
    return _served(app, config, gateway, host=config.admin_host)


def create_metrics_app(gateway: Gateway) -> Starlette:
    """What --metrics-port serves, to anybody."""
    app = Starlette(routes=[Route("/metrics", admin_routes.get_metrics)])
    app.state.gateway = gateway
    return app


def _served(app: FastAPI, config: GatewayConfig, gateway: Gateway, *, host: str) -> FastAPI:
    app.state.gateway = gateway
    app.state.is_private = is_loopback(host)
    app.add_middleware(
        RequestMiddleware,
        door=gateway.door,
        shutdown=gateway.shutdown,
        max_timeout=config.request_timeout,
        tenant_header=config.tenant_header,
        body_limits={"/v1/files": config.max_file_bytes + MAX_BODY_BYTES},
    )
    install_handlers(app)
    return app


def with_routes(*, for_operators: bool = True) -> FastAPI:
    """Enough to document the API. for_operators: with what they alone ask for."""
    app = openapi.DocumentedApp(
        title="Pagewire",
        version=__version__,
        description=openapi.DESCRIPTION,
        responses=openapi.ERROR_RESPONSES,
        docs_url=None,  # the page has it, with files of its own
        redoc_url=None,
    )
    app.include_router(generation_routes.router)
    app.include_router(router)
    app.include_router(probes.router)
    app.include_router(messages_routes.router)
    app.include_router(vectors_routes.router)
    app.include_router(files_routes.router)
    app.include_router(responses_routes.router)
    app.include_router(batch_routes.router)
    app.include_router(operation_routes.router)
    app.include_router(explain_routes.router)
    for one in admin_routes.ROUTERS if for_operators else ():
        app.include_router(one)
    app.include_router(sglang_routes.router)
    app.include_router(unserved.router)
    add_page(app)
    return app


@router.get(
    "/v1/models",
    tags=["models"],
    responses=openapi.responses_by_client(ModelList, ModelPage),
)
async def list_models(request: Request) -> Response:
    """What is served; with the header `anthropic-version` as Anthropic's clients list it."""
    models = await gateway_of(request).list_models()
    if request_context(request.scope).speaks_anthropic:
        return json_response(model_page(models))
    return json_response(ModelList(data=[_model(model) for model in models]))


@router.get(
    "/v1/models/{model:path}",
    tags=["models"],
    responses=openapi.responses_by_client(Model, ModelInfo),
)
async def retrieve_model(request: Request, model: str) -> Response:
    """One of the served models."""
    models = await gateway_of(request).list_models()
    for served in models:
        if served.id == model:
            speaks_anthropic = request_context(request.scope).speaks_anthropic
            return json_response(model_info(served) if speaks_anthropic else _model(served))
    names = ", ".join(served.id for served in models)
    raise ApiError(404, f"no model {model!r}; served: {names}", param="model", code="model_not_found")


def _model(model: inference_pb2.Model) -> Model:
    return Model(
        id=model.id, created=model.create_time.seconds, root=model.root, max_model_len=model.max_model_len or None
    )


@router.post("/tokenize", tags=["tokens"])
@router.post("/v1/tokenize", tags=["tokens"])
async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeResponse:
    """Text or messages to token ids, exactly as a completion would see them."""
    gateway = gateway_of(request)
    answers = [await gateway.call(gateway.inference.Tokenize, one) for one in tokenize_requests(body)]
    counts = [len(answer.token_ids) for answer in answers]
    tokens: Any = [list(answer.token_ids) for answer in answers]
    token_strs: Any = [list(answer.token_strs) for answer in answers]
    is_list = isinstance(body.prompt, list)
    return TokenizeResponse(
        count=counts if is_list else counts[0],
        max_model_len=answers[0].max_model_len,
        tokens=tokens if is_list else tokens[0],
        token_strs=(token_strs if is_list else token_strs[0]) if body.return_token_strs else None,
    )


@router.post("/detokenize", tags=["tokens"])
@router.post("/v1/detokenize", tags=["tokens"])
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
    """Token ids to text."""
    gateway = gateway_of(request)
    is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Any = body.tokens if is_list else [body.tokens]
    texts = []
    for token_ids in lists:
        upstream = inference_pb2.DetokenizeRequest(
            model=body.model or "", token_ids=token_ids, skip_special_tokens=bool(body.skip_special_tokens)
        )
        texts.append((await gateway.call(gateway.inference.Detokenize, upstream)).text)
    text = texts if is_list else texts[0]
    return DetokenizeResponse(prompt=text, text=text)


@router.get("/version", tags=["operation"])
async def version(request: Request) -> Version:
    """Of Pagewire."""
    return Version(version=__version__)

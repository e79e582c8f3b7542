"""The REST applications of a gateway process, and what their routes share."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Route

from pagewire import __version__
from pagewire.config import GatewayConfig
from pagewire.config.values.gateway import check_fingerprint
from pagewire.gateway.batches import routes as batch_routes
from pagewire.gateway.batches.batches import BATCHES, Batches
from pagewire.gateway.chat import routes as chat_routes
from pagewire.gateway.completions import routes as completions_routes
from pagewire.gateway.core import openapi
from pagewire.gateway.core.answering import GENERATIONS, Generations
from pagewire.gateway.core.body_room import BodyRoom
from pagewire.gateway.core.error_handlers import install_handlers
from pagewire.gateway.core.errors import OPENAI, Dialect
from pagewire.gateway.core.middleware import MAX_BODY_BYTES, RequestMiddleware
from pagewire.gateway.core.shutdown import SHUTDOWN, GracefulShutdown
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.dialects.ollama import routes as ollama_routes
from pagewire.gateway.dialects.ollama.errors import OLLAMA, PREFIX
from pagewire.gateway.dialects.tgi import errors as tgi
from pagewire.gateway.dialects.tgi import routes as tgi_routes
from pagewire.gateway.files import routes as files_routes
from pagewire.gateway.files.files import FILES, Files
from pagewire.gateway.generation.lines import LINES
from pagewire.gateway.generation.resumable import KEEPER
from pagewire.gateway.generation.searches import Searches
from pagewire.gateway.generation.style import STYLE, AnswerStyle
from pagewire.gateway.generation.translate import is_search
from pagewire.gateway.http.cors import Cors, CorsMiddleware
from pagewire.gateway.kept import Keeper
from pagewire.gateway.messages import routes as messages_routes
from pagewire.gateway.messages.errors import MESSAGES, is_spoken
from pagewire.gateway.models import routes as models_routes
from pagewire.gateway.models.line import ModelLine
from pagewire.gateway.models.models import MODELS, Models, Source
from pagewire.gateway.models.sorting import OneLine, Sorting
from pagewire.gateway.models.stack import Stack
from pagewire.gateway.operation import probes, unserved
from pagewire.gateway.operation import routes as operation_routes
from pagewire.gateway.operation.admin import routes as admin_routes
from pagewire.gateway.operation.explain import routes as explain_routes
from pagewire.gateway.operation.exposition.source import METRICS, Metrics
from pagewire.gateway.operation.readiness import READINESS, Readiness
from pagewire.gateway.operation.siblings import SIBLINGS, Siblings
from pagewire.gateway.operation.status.source import STATUS, StatusSource
from pagewire.gateway.page.routes import add_page, needs_no_key
from pagewire.gateway.responses import routes as responses_routes
from pagewire.gateway.responses.background import BACKGROUND, Background
from pagewire.gateway.responses.stored import RESPONSES, Responses
from pagewire.gateway.store import Bound, Bounds, Store, open_log
from pagewire.gateway.vectors import routes as vectors_routes
from pagewire.telemetry import metrics
from pagewire.wire.addresses import is_loopback
from pagewire.wire.discovery import Discovery, discover
from pagewire.wire.keys import Door
from pagewire.wire.secure_rpc import NO_TLS, ServiceTls


@dataclass(frozen=True)
class Parts:
    """The parts of one gateway process, which all of its applications share."""

    models: Models
    shutdown: GracefulShutdown
    door: Door
    generations: Generations
    keeper: Keeper
    files: Files
    batches: Batches
    responses: Responses
    background: Background
    siblings: Siblings
    readiness: Readiness
    status: StatusSource
    metrics: Metrics
    style: AnswerStyle

    @classmethod
    def of(cls, config: GatewayConfig, store: Store, tls: ServiceTls = NO_TLS) -> "Parts":
        """Raises StartupError."""
        check_fingerprint(config)

        def make_client(found: Discovery, line: ModelLine) -> TokenizerClient:
            return TokenizerClient(found, config, tls.listed_channel, line)

        models = Models(_source(config, tls), make_client, (is_search, Searches))
        generations = Generations()
        files = Files(store, config.max_file_bytes, config.file_store_size)
        stored = Bound(config.max_stored_responses, config.response_store_size)
        responses = Responses(store, stored, config.response_store_ttl)
        logs = Bounds(stored.count, stored.bytes, config.response_store_ttl, drops_unfinished=False)
        kept = Bounds(config.max_stored_generations, config.generation_store_size, config.generation_store_ttl)
        shutdown = GracefulShutdown()
        readiness = Readiness(models, shutdown)
        siblings = Siblings(store.directory, metrics.exposition, generations.accounts)
        return cls(
            models=models,
            shutdown=shutdown,
            door=Door(config.api_keys, config.api_key_file),
            generations=generations,
            keeper=Keeper(
                open_log(config.generation_store or "disk", store.directory, kept),
                keep_all_streams=config.resumable_streams,
                seed=config.seed,
            ),
            files=files,
            batches=Batches(store, files),
            responses=responses,
            background=Background(models, responses, store.jobs("response", logs)),
            siblings=siblings,
            readiness=readiness,
            status=StatusSource(models, readiness.why_not),
            metrics=Metrics(models, siblings, with_vllm_names=config.vllm_metrics),
            style=AnswerStyle.of(config),
        )


def _source(config: GatewayConfig, tls: ServiceTls) -> Source:
    """Returns what knows the lines. Raises StartupError."""
    if config.lines_address:
        return Stack(config.lines_address)
    found = discover(config.tokenizer_discovery, "--tokenizer-address", config.tokenizer_address)
    is_one = config.tokenizer_discovery == "static" and "," not in config.tokenizer_address
    return OneLine(found) if is_one else Sorting(found, tls.listed_channel)


def create_app(config: GatewayConfig, parts: Parts, cors: Cors | None = None) -> FastAPI:
    """Returns what --port serves: all routes, except those of --admin-port where there is one."""
    app = with_routes(for_operators=config.admin_port is None, has_docs=not config.disable_fastapi_docs)
    _serve(app, config, parts, host=config.host)
    if cors is not None:
        app.add_middleware(CorsMiddleware, cors=cors)  # around all others, as refusals have the headers, too
    return app


def create_admin_app(config: GatewayConfig, parts: Parts) -> FastAPI:
    """Returns what --admin-port serves."""
    app = FastAPI(title="Pagewire", docs_url=None, redoc_url=None, openapi_url=None)
    for one in (*admin_routes.ROUTERS, probes.router):
        app.include_router(one)
    _serve(app, config, parts, host=config.admin_host)
    return app


def create_metrics_app(parts: Parts) -> Starlette:
    """Returns what --metrics-port serves, without a key."""
    app = Starlette(routes=[Route("/metrics", admin_routes.get_metrics)])
    _put(app, parts)
    return app


def with_routes(*, for_operators: bool = True, has_docs: bool = True) -> openapi.DocumentedApp:
    """Returns an application with enough to document the API.

    Args:
        for_operators: whether the routes of --admin-port are included.
        has_docs: whether the documentation is served.
    """
    app = openapi.DocumentedApp(
        document_url="/openapi.json" if has_docs else None,  # the page has its own files to show it
        same=partial(with_routes, for_operators=for_operators, has_docs=has_docs),
        title="Pagewire",
        version=__version__,
        description=openapi.DESCRIPTION,
        responses=openapi.ERROR_RESPONSES,
    )
    app.include_router(chat_routes.router)
    app.include_router(completions_routes.router)
    app.include_router(models_routes.router)
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
    for one in (ollama_routes.router, ollama_routes.admin_router, tgi_routes.router):
        app.include_router(one)
    app.include_router(unserved.router)
    add_page(app, has_docs=has_docs)
    return app


def _serve(app: FastAPI, config: GatewayConfig, parts: Parts, *, host: str) -> None:
    _put(app, parts)
    app.state.is_private = is_loopback(host)
    app.add_middleware(
        RequestMiddleware,
        door=parts.door,
        shutdown=parts.shutdown,
        room=BodyRoom(),
        max_timeout=config.request_timeout,
        tenant_header=config.tenant_header,
        body_limits={"/v1/files": config.max_file_bytes + MAX_BODY_BYTES},
        needs_no_key=needs_no_key,
        dialect_of=_dialect_of,
    )
    install_handlers(app)


def _dialect_of(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    if path.startswith(PREFIX):
        return OLLAMA
    if path == tgi.PATH:
        return tgi.TGI
    return MESSAGES if is_spoken(path, headers) else OPENAI


def _put(app: Starlette, parts: Parts) -> None:
    MODELS.put(app, parts.models)
    SHUTDOWN.put(app, parts.shutdown)
    GENERATIONS.put(app, parts.generations)
    LINES.put(app, parts.models)
    KEEPER.put(app, parts.keeper)
    FILES.put(app, parts.files)
    BATCHES.put(app, parts.batches)
    RESPONSES.put(app, parts.responses)
    BACKGROUND.put(app, parts.background)
    SIBLINGS.put(app, parts.siblings)
    READINESS.put(app, parts.readiness)
    STATUS.put(app, parts.status)
    METRICS.put(app, parts.metrics)
    STYLE.put(app, parts.style)

"""TGI's routes, and `/generate`, which TGI and SGLang have: a body with `inputs` is TGI's, any other SGLang's."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Discriminator, RootModel, Tag
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.body import ErrorResponse
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.dialects.sglang.bodies import NativeGenerateRequest, NativeOutput
from pagewire.gateway.dialects.sglang.routes import generate as sglang_generate
from pagewire.gateway.dialects.tgi.answer import TgiAnswer
from pagewire.gateway.dialects.tgi.bodies import TgiError, TgiEvent, TgiGenerateRequest, TgiOutput
from pagewire.gateway.dialects.tgi.errors import TGI
from pagewire.gateway.dialects.tgi.translate import NAMES, completion_of, request_of
from pagewire.gateway.generation.resumable import KEEPER
from pagewire.gateway.generation.serving import GenerationResponse


def _is_tgi(body: Any) -> bool:
    return isinstance(body, TgiGenerateRequest) or (isinstance(body, dict) and "inputs" in body)


class GenerateBody(
    BoundedModel,
    RootModel[
        Annotated[
            Annotated[TgiGenerateRequest, Tag("tgi")] | Annotated[NativeGenerateRequest, Tag("sglang")],
            Discriminator(lambda body: "tgi" if _is_tgi(body) else "sglang"),
        ]
    ],
):
    """TGI's body if it has `inputs`, otherwise SGLang's."""


class SharedRoute(JsonRoute):
    """A route of bodies of both kinds. Its errors have the shape that the sender of the body reads."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answered(request: Request) -> Response:
            context = request_context(request.scope)
            if request.url.path != _SHARED:
                context.dialect = TGI
            try:
                return await handle(request)
            except (RequestValidationError, ApiError, RecursionError, UnicodeEncodeError) as error:
                body = error.body if isinstance(error, RequestValidationError) else None
                # JSON that cannot be read may still say which kind it is.
                if _is_tgi(body) or (body is None and b'"inputs"' in await request.body()):
                    context.dialect = TGI
                raise

        return answered


_ERRORS = openapi.error_responses(ErrorResponse, TgiError)
router = APIRouter(route_class=SharedRoute, tags=["generation"], responses=_ERRORS)


_SHARED = "/generate"
_EVENTS = (TgiEvent, TgiError)


@router.post(
    _SHARED,
    responses=openapi.native_responses(
        NativeOutput, TgiOutput, events=(NativeOutput, ErrorResponse, *_EVENTS), done=True
    ),
)
async def generate(request: Request, body: GenerateBody) -> Response:
    """Continues a prompt in the API of the body: TGI's if it has `inputs`; otherwise SGLang's, which takes several
    prompts. With `stream: true` as events."""
    if isinstance(body.root, TgiGenerateRequest):
        return await _answer(request, body.root, stream=bool(body.root.stream))
    return await sglang_generate(request, body.root)


@router.post(
    "/generate_stream",
    responses={200: {"description": "Events.", "content": openapi.events_of(_EVENTS, done=False)}},
)
async def generate_stream(request: Request, body: TgiGenerateRequest) -> Response:
    """Continues a prompt in TGI's API, as events."""
    return await _answer(request, body, stream=True)


@router.post("/", responses=openapi.native_responses(TgiOutput, events=_EVENTS, done=False))
async def generate_at_root(request: Request, body: TgiGenerateRequest) -> Response:
    """Continues a prompt in TGI's API, as `huggingface_hub.InferenceClient` asks: with a list of one output; with
    `stream: true` as events."""
    return await _answer(request, body, stream=bool(body.stream), in_list=True)


async def _answer(request: Request, body: TgiGenerateRequest, *, stream: bool, in_list: bool = False) -> Response:
    context = request_context(request.scope)
    context.dialect, context.names = TGI, NAMES
    body.stream = stream
    completion = completion_of(body)
    kept = await KEEPER.of(request).open(request, completion)
    upstream = request_of(body, completion)
    answer = TgiAnswer(body, context.request_id, upstream.sampling_params.seed, in_list=in_list)
    return GenerationResponse([upstream], answer, stream=stream, kept=kept)

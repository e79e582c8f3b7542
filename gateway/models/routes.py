"""The routes of the served models and of their tokens."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.body import ErrorResponse
from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.messages.bodies.answers import MessagesError, ModelInfo, ModelPage
from pagewire.gateway.messages.errors import MESSAGES
from pagewire.gateway.messages.models import model_info, model_page
from pagewire.gateway.models.bodies import (
    DetokenizeRequest,
    DetokenizeResponse,
    Model,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from pagewire.gateway.models.entries import entry
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.models.translate import tokenize_requests
from pagewire.v1 import inference_pb2

router = APIRouter(route_class=JsonRoute)

_ERRORS = (ErrorResponse, MessagesError)


@router.get(
    "/v1/models",
    tags=["models"],
    responses=openapi.responses_by_client((ModelList, ModelPage), _ERRORS),
)
async def list_models(request: Request) -> Response:
    """Lists the served models, those of the default one first; with the header `anthropic-version` in Anthropic's
    form."""
    served = await MODELS.of(request).list_all()
    if request_context(request.scope).dialect is MESSAGES:
        return json_response(model_page([one.model for one in served]))
    return json_response(ModelList(data=[entry(one) for one in served]))


@router.get(
    "/v1/models/{model:path}",
    tags=["models"],
    responses=openapi.responses_by_client((Model, ModelInfo), _ERRORS),
)
async def retrieve_model(request: Request, model: str) -> Response:
    """Describes one served model."""
    served = await MODELS.of(request).named(model)
    for_anthropic = request_context(request.scope).dialect is MESSAGES
    return json_response(model_info(served.model) if for_anthropic else entry(served))


@router.post("/tokenize", tags=["tokens"])
@router.post("/v1/tokenize", tags=["tokens"])
async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeResponse:
    """Encodes text or messages as the token ids of a completion's prompt."""
    tokenizer = await MODELS.of(request).client(body.model)
    answers = [await tokenizer.call(tokenizer.inference.Tokenize, one) for one in tokenize_requests(body)]
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
    """Decodes token ids to text."""
    tokenizer = await MODELS.of(request).client(body.model)
    is_list = bool(body.tokens) and isinstance(body.tokens[0], list)
    lists: Any = body.tokens if is_list else [body.tokens]
    texts = []
    for token_ids in lists:
        upstream = inference_pb2.DetokenizeRequest(
            model=body.model or "", token_ids=token_ids, skip_special_tokens=bool(body.skip_special_tokens)
        )
        texts.append((await tokenizer.call(tokenizer.inference.Detokenize, upstream)).text)
    text = texts if is_list else texts[0]
    return DetokenizeResponse(prompt=text, text=text)

"""The routes of chats and completions."""

from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.gateway import Gateway, gateway_of, head_of
from pagewire.gateway.core.json_route import JsonRoute
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.generation.answer import Answer
from pagewire.gateway.generation.chat import ChatAnswer
from pagewire.gateway.generation.completions import CompletionAnswer, prompt_texts
from pagewire.gateway.generation.grammar import names_of
from pagewire.gateway.generation.searches import is_search
from pagewire.gateway.generation.serving import GenerationResponse
from pagewire.gateway.generation.translate import chat_requests, completion_requests
from pagewire.gateway.kept import Kept
from pagewire.gateway.schema.requests import ChatCompletionRequest, CompletionRequest, GenerationParameters
from pagewire.gateway.schema.responses import ChatCompletion, ChatCompletionChunk, Completion, CompletionChunk
from pagewire.v1 import inference_pb2

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    tags=["generation"],
    responses=openapi.generation_responses(ChatCompletion, ChatCompletionChunk),
)
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """The next turn of a conversation; with `stream: true` as server-sent events."""
    gateway = gateway_of(request)
    names = names_of(body)
    # Where `logprobs` is a switch, the number is in the other one.
    request_context(request.scope).names = names if body.logprobs is None else {**names, "logprobs": "top_logprobs"}
    kept = await gateway.keeper.open(request, body)
    answer = ChatAnswer(body, await head_of(request, body, "chatcmpl"))
    return _generation(gateway, body, chat_requests(body), answer, kept)


@router.post(
    "/v1/completions",
    tags=["generation"],
    responses=openapi.generation_responses(Completion, CompletionChunk),
)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """What follows each prompt (text or token ids, one or several); with `stream: true` as server-sent events."""
    gateway = gateway_of(request)
    request_context(request.scope).names = names_of(body)
    kept = await gateway.keeper.open(request, body)
    requests, head = completion_requests(body), await head_of(request, body, "cmpl")
    # With log probabilities of the prompt its text comes along.
    echoes = await prompt_texts(gateway, body) if body.echo and body.logprobs is None else ()
    answer = CompletionAnswer(body, head, echoes)
    return _generation(gateway, body, requests, answer, kept)


def _generation(
    gateway: Gateway,
    body: GenerationParameters,
    requests: Sequence[inference_pb2.GenerateRequest],
    answer: Answer,
    kept: Kept | None,
) -> Response:
    link = gateway.searches if is_search(requests[0]) else gateway.link
    return GenerationResponse(
        link,
        requests,
        answer,
        stream=bool(body.stream),
        choices_per_prompt=body.n or 1,
        counts_output=body.max_tokens != 0,
        kept=kept,
    )

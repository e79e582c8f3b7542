"""The route of chat completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.gateway.chat.answer import ChatAnswer
from pagewire.gateway.chat.bodies import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from pagewire.gateway.chat.translate import chat_requests
from pagewire.gateway.core import openapi
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.generation.grammar import names_of
from pagewire.gateway.generation.head import head_of
from pagewire.gateway.generation.resumable import KEEPER
from pagewire.gateway.generation.serving import GenerationResponse

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    tags=["generation"],
    responses=openapi.generation_responses(ChatCompletion, ChatCompletionChunk),
)
async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
    """Generates the next turn of a conversation; with `stream: true` as server-sent events."""
    names = names_of(body)
    # `logprobs` is a switch; the number is in `top_logprobs`.
    request_context(request.scope).names = names if body.logprobs is None else {**names, "logprobs": "top_logprobs"}
    kept = await KEEPER.of(request).open(request, body)
    head = await head_of(request, body, "chatcmpl")
    return GenerationResponse(
        chat_requests(body),
        ChatAnswer(body, head),
        stream=bool(body.stream),
        choices_per_prompt=body.n or 1,
        kept=kept,
        timing=head.timing,
    )

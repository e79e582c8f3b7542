"""The routes of Anthropic's Messages API."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.gateway.chat.translate import chat_requests
from pagewire.gateway.core import openapi
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.generation.lines import LINES
from pagewire.gateway.generation.resumable import KEEPER
from pagewire.gateway.generation.serving import GenerationResponse
from pagewire.gateway.messages.answer import MessagesAnswer
from pagewire.gateway.messages.bodies.answers import EVENTS, AnsweredMessage, MessagesError, TokenCount
from pagewire.gateway.messages.bodies.requests import CountTokensRequest, MessagesRequest
from pagewire.gateway.messages.translate import chat_request, names_of, tokenize_request

router = APIRouter(route_class=JsonRoute, tags=["messages"], responses=openapi.error_responses(MessagesError))

_ANSWER: openapi.Responses = {
    200: {
        "description": "The answer; with `stream: true` as events.",
        "content": openapi.content(AnsweredMessage) | openapi.events_of(EVENTS, done=False),
    }
}


@router.post("/v1/messages", responses=_ANSWER)
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Generates the next turn of a conversation in Anthropic's API; with `stream: true` as server-sent events."""
    request_context(request.scope).names = names_of(body)
    chat = chat_request(body)
    kept = await KEEPER.of(request).open(request, chat)
    requests = chat_requests(chat)
    for one in requests:
        one.clamp_max_tokens = True  # as in Anthropic's API, the answer says so (model_context_window_exceeded)
    answer = MessagesAnswer(
        request_context(request.scope).request_id,
        await LINES.of(request).name_of(chat.model),
        max_tokens=body.max_tokens,
        show_thinking=getattr(body.thinking, "display", None) != "omitted",
    )
    return GenerationResponse(
        requests,
        answer,
        stream=bool(body.stream),
        kept=kept,
    )


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(request: Request, body: CountTokensRequest) -> TokenCount:
    """Counts the tokens of the prompt of such a request."""
    tokenizer = await LINES.of(request).client(body.model)
    answer = await tokenizer.call(tokenizer.inference.Tokenize, tokenize_request(body))
    return TokenCount(input_tokens=len(answer.token_ids))

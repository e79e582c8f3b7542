"""The routes of the Responses API."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from pagewire.gateway.core import openapi
from pagewire.gateway.core.encoding import EVENT_STREAM_HEADERS, json_response
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.core.shutdown import SHUTDOWN
from pagewire.gateway.generation.head import head_of
from pagewire.gateway.generation.lines import LINES
from pagewire.gateway.generation.resumable import KEEPER
from pagewire.gateway.generation.serving import GenerationResponse
from pagewire.gateway.generation.shortening import count_tokens, shortened
from pagewire.gateway.responses.answer import ResponseAnswer
from pagewire.gateway.responses.background import BACKGROUND
from pagewire.gateway.responses.bodies.answers import (
    DeletedResponse,
    InputItemList,
    InputTokens,
    ModelResponse,
)
from pagewire.gateway.responses.bodies.items import MessageItem
from pagewire.gateway.responses.bodies.queries import InputItemsQuery, RetrieveQuery
from pagewire.gateway.responses.bodies.requests import CreateResponse
from pagewire.gateway.responses.conversation import AnyItem, messages_of
from pagewire.gateway.responses.events import EVENTS
from pagewire.gateway.responses.stored import PREFIX, RESPONSES, Stored, new_id, stored_input, stored_response
from pagewire.gateway.responses.translate import generate_request, names_of, new_response
from pagewire.gateway.responses.writer import ResponseWriter
from pagewire.v1.inference_pb2 import GenerateRequest

router = APIRouter(route_class=JsonRoute, tags=["responses"])

_EVENT_STREAM = {name.decode(): value.decode() for name, value in EVENT_STREAM_HEADERS}
_RESPONSE = openapi.event_responses(ModelResponse, EVENTS)


@router.post("/v1/responses", responses=_RESPONSE)
async def create_response(request: Request, body: CreateResponse) -> Response:
    """Generates the next turn of a conversation; with `stream: true` as server-sent events."""
    request_context(request.scope).names = names_of(body)
    responses = RESPONSES.of(request)
    kept = await KEEPER.of(request).open(request, body)
    own, generate = await _read(request, body)
    head = replace(await head_of(request, body, "resp"), id=new_id() if kept is None else PREFIX + kept.id)
    response = new_response(body, head.id, head.created, head.model)
    input = stored_input(head.id, own)
    stored = None if kept is None else await responses.find(head.id)
    if stored is not None and not body.stream:
        return _told(stored)
    if body.background:
        if stored is None:
            generate.model = head.model  # also after a restart with another default model
            await BACKGROUND.of(request).add(response, input, generate)
        return await _events(request, head.id, 0) if body.stream else json_response(response)
    answer = ResponseAnswer(ResponseWriter(response, logprobs=generate.sampling_params.HasField("logprobs")))

    async def keep() -> None:
        await responses.save(head.id, stored_response(answer.response, input))

    return GenerationResponse(
        [generate],
        answer,
        stream=bool(body.stream),
        ended=keep if response.store else None,
        kept=kept,
    )


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(request: Request, body: CreateResponse) -> InputTokens:
    """Counts the tokens that the prompt of a response would have, without its images."""
    request_context(request.scope).names = names_of(body)
    _, generate = await _read(request, body)
    tokenizer = await LINES.of(request).client(body.model)
    return InputTokens(input_tokens=(await count_tokens(tokenizer, generate))[0])


async def _read(request: Request, body: CreateResponse) -> tuple[list[AnyItem], GenerateRequest]:
    """Returns the items of the input, and the request for the next turn of the conversation."""
    responses = RESPONSES.of(request)
    own = await responses.resolve(_items(body))
    history = await responses.conversation(body.previous_response_id) if body.previous_response_id else []
    items = [*history, *own]

    def request_of(items: Sequence[AnyItem]) -> GenerateRequest:
        return generate_request(body, messages_of(body.instructions, items))

    if body.truncation == "auto":
        return own, await shortened(await LINES.of(request).client(body.model), items, request_of, _role_of)
    return own, request_of(items)


def _role_of(item: AnyItem) -> str:
    return item.role if isinstance(item, MessageItem) else ""


def _items(body: CreateResponse) -> list[AnyItem]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input or ())


@router.get("/v1/responses/{response_id}", responses=_RESPONSE)
async def retrieve_response(request: Request, response_id: str, query: Annotated[RetrieveQuery, Query()]) -> Response:
    """Returns a stored response; with `stream=true` the events of a background response, even while it is generated."""
    if query.stream:
        return await _events(request, response_id, 0 if query.starting_after is None else query.starting_after + 1)
    return _told(await RESPONSES.of(request).get(response_id))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> DeletedResponse:
    await BACKGROUND.of(request).delete(response_id)
    return DeletedResponse(id=response_id)


@router.post("/v1/responses/{response_id}/cancel", responses={200: openapi.response(ModelResponse)})
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a background response, which keeps its output until then."""
    return _told(await BACKGROUND.of(request).cancel(response_id))


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request, response_id: str, query: Annotated[InputItemsQuery, Query()]
) -> InputItemList:
    """Lists the input items of this response, in their long form, without earlier turns."""
    return await RESPONSES.of(request).input_items(response_id, query)


def _told(stored: Stored) -> Response:
    return Response(stored.response, media_type="application/json")


async def _events(request: Request, id: str, first: int) -> Response:
    events = await BACKGROUND.of(request).events(id, first, SHUTDOWN.of(request))
    return StreamingResponse(events, headers=_EVENT_STREAM)

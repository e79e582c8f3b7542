"""The route of text completions."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.gateway.completions.answer import CompletionAnswer, prompt_texts
from pagewire.gateway.completions.bodies import Completion, CompletionChunk, CompletionRequest
from pagewire.gateway.completions.translate import completion_requests
from pagewire.gateway.core import openapi
from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.generation.grammar import names_of
from pagewire.gateway.generation.head import head_of
from pagewire.gateway.generation.lines import LINES
from pagewire.gateway.generation.resumable import KEEPER
from pagewire.gateway.generation.serving import GenerationResponse

router = APIRouter(route_class=JsonRoute)


@router.post(
    "/v1/completions",
    tags=["generation"],
    responses=openapi.generation_responses(Completion, CompletionChunk),
)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continues each prompt (text or token ids, one or several); with `stream: true` as server-sent events."""
    request_context(request.scope).names = names_of(body)
    kept = await KEEPER.of(request).open(request, body)
    requests, head = completion_requests(body), await head_of(request, body, "cmpl")
    # Log probabilities of the prompt come with its text.
    echoes = await prompt_texts(LINES.of(request), body) if body.echo and body.logprobs is None else ()
    return GenerationResponse(
        requests,
        CompletionAnswer(body, head, echoes),
        stream=bool(body.stream),
        choices_per_prompt=body.n or 1,
        counts_output=body.max_tokens != 0,
        kept=kept,
        timing=head.timing,
    )

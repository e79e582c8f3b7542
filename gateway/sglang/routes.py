"""SGLang's native route."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.gateway.core import openapi
from pagewire.gateway.core.gateway import gateway_of
from pagewire.gateway.core.json_route import JsonRoute, parse
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.generation.serving import GenerationResponse
from pagewire.gateway.generation.translate import completion_requests
from pagewire.gateway.schema.requests import CompletionRequest
from pagewire.gateway.sglang.generate import NativeAnswer, completion_body, names_of
from pagewire.gateway.sglang.schema import NativeGenerateRequest, NativeOutput

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/generate", responses=openapi.native_responses(NativeOutput))
async def generate(request: Request, body: NativeGenerateRequest) -> Response:
    """SGLang's own API: what follows each prompt, an output or a list of them; with `stream: true` as events."""
    context = request_context(request.scope)
    context.names = names_of(body)
    gateway, completion = gateway_of(request), parse(CompletionRequest, completion_body(body))
    kept = await gateway.keeper.open(request, completion)
    if body.rid is not None and kept is None and "x-request-id" not in request.headers:
        context.request_id = body.rid
    answer = NativeAnswer(body, context.request_id)
    requests = completion_requests(completion)
    return GenerationResponse(
        gateway.link,
        requests,
        answer,
        stream=bool(body.stream),
        choices_per_prompt=completion.n or 1,
        kept=kept,
    )

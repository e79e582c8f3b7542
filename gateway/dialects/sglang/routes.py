"""SGLang's native route, which shares its path with TGI's: see `dialects/tgi/routes.py`."""

from fastapi import Request
from starlette.responses import Response

from pagewire.gateway.completions.bodies import CompletionRequest
from pagewire.gateway.completions.translate import completion_requests
from pagewire.gateway.core.reading.json_route import parse
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.dialects.sglang.answer import NativeAnswer
from pagewire.gateway.dialects.sglang.bodies import NativeGenerateRequest
from pagewire.gateway.dialects.sglang.translate import completion_body, names_of
from pagewire.gateway.generation.resumable import KEEPER
from pagewire.gateway.generation.serving import GenerationResponse


async def generate(request: Request, body: NativeGenerateRequest) -> Response:
    """Continues each prompt in SGLang's own API, with an output or a list of them; with `stream: true` as events."""
    context = request_context(request.scope)
    context.names = names_of(body)
    completion = await parse(CompletionRequest, completion_body(body))
    kept = await KEEPER.of(request).open(request, completion)
    if body.rid is not None and kept is None and "x-request-id" not in request.headers:
        context.request_id = body.rid
    answer = NativeAnswer(body, context.request_id)
    requests = completion_requests(completion)
    if body.sampling_params is None or body.sampling_params.max_new_tokens is None:
        for one in requests:
            one.clamp_max_tokens = True
    return GenerationResponse(
        requests,
        answer,
        stream=bool(body.stream),
        choices_per_prompt=completion.n or 1,
        kept=kept,
    )

"""Bodies of /v1/completions to GenerateRequests."""

from pagewire.gateway.completions.bodies import CompletionRequest
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.choice_limits import check_choices, check_prompt_logprobs
from pagewire.gateway.generation.translate import choices_of, generate_request
from pagewire.gateway.schema.parameters import as_list
from pagewire.v1 import inference_pb2

COMPLETION_MAX_TOKENS = 16
# Prompts times choices of one HTTP request; more belong into a batch.
MAX_GENERATIONS = 1024


def completion_requests(body: CompletionRequest) -> list[inference_pb2.GenerateRequest]:
    """Returns one request for each prompt and choice: the choices of the first prompt, then those of the second, ...

    Raises ApiError 400.
    """
    # One token is always generated.
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    requests = []
    prompts = as_list(body.prompt)
    count, factor = (body.n or 1, "n") if body.best_of is None else (body.best_of, "best_of")
    if (total := len(prompts) * count) > MAX_GENERATIONS:
        message = (
            f"the request has {total} completions (prompts times {factor}); at most {MAX_GENERATIONS} are possible"
        )
        raise ApiError(400, message, param="prompt")
    common = generate_request(body, max_tokens, body.logprobs)
    common.clamp_max_tokens = not body.max_tokens
    if body.echo and body.logprobs is not None:
        params = common.sampling_params
        params.prompt_logprobs = max(body.logprobs, params.prompt_logprobs)
    common.suffix = body.suffix or ""
    if body.add_special_tokens is not None:
        common.add_special_tokens = body.add_special_tokens
    if body.best_of is not None and body.best_of > (body.n or 1):
        common.best_of = body.best_of
    check_choices(common, total, "prompt", count * sum(map(len, prompts)))
    if common.sampling_params.HasField("prompt_logprobs") and not body.stream and body.truncate_prompt_tokens is None:
        check_prompt_logprobs(common.sampling_params.prompt_logprobs, prompts, body.n or 1)
    for prompt in prompts:
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(common)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.extend(choices_of(request, body))
    return requests

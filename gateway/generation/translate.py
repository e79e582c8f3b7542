"""The common parameters of bodies as GenerateRequests. Only given values are set; the services apply the defaults."""

import secrets

from pagewire.config.sampling_params import BY_NAME, seed_of_choice
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.choice_limits import check_choices
from pagewire.gateway.generation.grammar import grammar_of
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import BeamSearch, GenerateRequest


def generate_request(body: GenerationParameters, max_tokens: int | None, logprobs: int | None) -> GenerateRequest:
    """Returns a request without prompt and seed. Raises ApiError 400."""
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise ApiError(
            400,
            f"min_tokens {body.min_tokens} is greater than the limit of {max_tokens} tokens; lower it",
            param="min_tokens",
        )
    values = {name: getattr(body, name) for name in BY_NAME} | {"max_tokens": max_tokens, "logprobs": logprobs}
    request = GenerateRequest(
        model=body.model or "",
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncate_end=body.truncation_side == "right",
        sampling_params=common_pb2.SamplingParams(
            **values,
            stop_token_ids=body.stop_token_ids,
            allowed_token_ids=body.allowed_token_ids,
            grammar=grammar_of(body),
        ),
        bad_words=body.bad_words,
        thinking_token_budget=None if body.thinking_token_budget == -1 else body.thinking_token_budget,
    )
    if body.logit_bias:
        request.sampling_params.logit_bias_ids.extend(map(int, body.logit_bias))
        request.sampling_params.logit_bias_values.extend(body.logit_bias.values())
    if body.skip_special_tokens is not None:
        request.skip_special_tokens = body.skip_special_tokens
    if body.use_beam_search:
        search = BeamSearch(length_penalty=body.length_penalty, early_stopping=bool(body.early_stopping))
        request.beam_search.CopyFrom(search)
    return request


def is_search(request: GenerateRequest) -> bool:
    """Returns whether the tokenizer service searches for the outputs, all of them in one call."""
    return request.best_of > 0 or request.HasField("beam_search")


def choices_of(request: GenerateRequest, body: GenerationParameters) -> list[GenerateRequest]:
    """Returns n requests with different seeds; for a search, n times the same one. The first is the given request.

    If the client gives no seed, one is drawn here, so that a resubmitted request continues its random stream.

    Raises ApiError 400.
    """
    check_choices(request, body.n or 1, "n")
    seed = secrets.randbits(63) if body.seed is None else body.seed
    if is_search(request):
        request.n = body.n or 1
        request.sampling_params.seed = seed
        return [request] * request.n
    requests = [request]
    for choice in range(1, body.n or 1):
        one = GenerateRequest()
        one.CopyFrom(request)
        if not body.stream:  # the first choice returns them for all
            one.sampling_params.ClearField("prompt_logprobs")
        one.sampling_params.seed = seed_of_choice(seed, choice)
        requests.append(one)
    request.sampling_params.seed = seed_of_choice(seed, 0)
    return requests

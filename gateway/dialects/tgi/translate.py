"""TGI's bodies as text completions, which have the same parameters by other names."""

from collections.abc import Mapping
from typing import Any

from pagewire.gateway.completions.bodies import CompletionRequest
from pagewire.gateway.completions.translate import completion_requests
from pagewire.gateway.core.field_names import GRAMMAR
from pagewire.gateway.dialects.tgi.bodies import MAX_NEW_TOKENS, TgiGenerateRequest, TgiGrammar, TgiParameters
from pagewire.v1.inference_pb2 import GenerateRequest

_SAMPLING = ("temperature", "top_p", "top_k")
_SAME = (*_SAMPLING, "repetition_penalty", "frequency_penalty", "seed")
NAMES: Mapping[str, str] = {
    **{name: f"parameters.{name}" for name in (*_SAME, "stop")},
    "max_tokens": "parameters.max_new_tokens",
    "truncate_prompt_tokens": "parameters.truncate",
    "logprobs": "parameters.top_n_tokens",
    "guided_json": "parameters.grammar",
    "guided_regex": "parameters.grammar",
    GRAMMAR: "parameters.grammar",
    "prompt": "inputs",
}


def completion_of(body: TgiGenerateRequest) -> CompletionRequest:
    """Returns the body of /v1/completions with the same meaning."""
    params = body.parameters or TgiParameters()
    given: dict[str, Any] = {name: getattr(params, name) for name in _SAME}
    if not params.do_sample and all(given[name] is None for name in _SAMPLING):
        given["temperature"] = 0.0
    return CompletionRequest.model_construct(
        model=params.adapter_id or body.model,
        prompt=body.inputs,
        stream=body.stream,
        max_tokens=params.max_new_tokens or MAX_NEW_TOKENS,
        stop=params.stop or None,
        include_stop_str_in_output=True,
        truncate_prompt_tokens=params.truncate,
        # Every token of a stream has its log probability.
        logprobs=(params.top_n_tokens or 0) if params.details else 0 if body.stream else None,
        **_form(params.grammar),
        **given,
    )


def request_of(body: TgiGenerateRequest, completion: CompletionRequest) -> GenerateRequest:
    """Raises ApiError 400."""
    [request] = completion_requests(completion)
    request.clamp_max_tokens = body.parameters is None or body.parameters.max_new_tokens is None
    return request


def _form(grammar: TgiGrammar | None) -> dict[str, Any]:
    if grammar is None:
        return {}
    if grammar.type == "regex":
        return {"guided_regex": grammar.value}
    value = grammar.value
    if grammar.type == "json_schema" and isinstance(value, dict) and "schema" in value:
        value = value["schema"]
    return {"guided_json": value}

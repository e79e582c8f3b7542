"""Converts bodies of /generate to equivalent bodies of text completions."""

from typing import Any

from pagewire.gateway.core.field_names import GRAMMAR
from pagewire.gateway.dialects.sglang.bodies import MAX_NEW_TOKENS, NativeGenerateRequest, NativeSamplingParams
from pagewire.gateway.schema.sglang import OF_SGLANG

# SGLang's names -> those of completions.
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


def completion_body(body: NativeGenerateRequest) -> dict[str, Any]:
    """Returns the body of /v1/completions with the same meaning."""
    params = (body.sampling_params or NativeSamplingParams()).model_dump(exclude_none=True)
    tag = params.pop("structural_tag", None)
    given = {
        "prompt": body.input_ids if body.text is None else body.text,
        "stream": body.stream,
        "request_id": body.rid,
        "logprobs": (body.top_logprobs_num or 0) if body.return_logprob else None,
        "structured_outputs": None if tag is None else {"structural_tag": tag},
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "lora_path": body.lora_path,
        "max_tokens": MAX_NEW_TOKENS,
    }
    return given | {_NAMES.get(name, name): value for name, value in params.items()}


def names_of(body: NativeGenerateRequest) -> dict[str, str]:
    """Returns the names of this API for parameters of completions."""
    params = body.sampling_params
    forms = ("json_schema", "regex", "ebnf", "structural_tag")
    form = next((name for name in forms if getattr(params, name, None) is not None), "")
    own = {
        **{name: name for name in NativeSamplingParams.model_fields},
        **{ours: name for name, ours in _NAMES.items()},
        **{ours: name for name, ours in OF_SGLANG.items() if name in NativeSamplingParams.model_fields},
        **({GRAMMAR: form} if form else {}),
    }
    return {
        **{ours: f"sampling_params.{name}" for ours, name in own.items()},
        "prompt": "input_ids" if body.text is None else "text",
        "logprobs": "top_logprobs_num",
    }

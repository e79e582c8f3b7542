"""The fields of a body that are rows of `pagewire.config.sampling_params`: its types, defaults and ranges."""

from typing import Any

from pagewire.config.sampling_params import PARAMETERS
from pagewire.gateway.schema.field import Service, field

# What it costs on a GPU.
EAGER = "Its steps sample outside of CUDA graphs."

_MEANINGS: dict[str, tuple[Service, str]] = {
    "temperature": ("executor", "Divides the logits; 0: always the most probable token."),
    "top_p": ("executor", "Sample from the fewest tokens whose probabilities add up to it."),
    "top_k": ("executor", "Sample from that many of the most probable tokens; 0 or -1: from all."),
    "min_p": ("executor", "Leave out tokens less probable than this share of the most probable one."),
    "repetition_penalty": (
        "executor",
        f"Logits of tokens in prompt or output: divided, if negative multiplied. {EAGER}",
    ),
    "presence_penalty": ("executor", f"Taken from the logits of tokens in the output, once. {EAGER}"),
    "frequency_penalty": ("executor", f"Taken from the logits of tokens in the output, for each time. {EAGER}"),
    "seed": ("executor", "Same seed, same output, whatever runs beside it. Unset: drawn."),
    "max_tokens": ("scheduler", "Longest output. Unset: what the model takes, in completions 16."),
    "min_tokens": ("executor", f"No end token is sampled, and no stop string counts, before so many. {EAGER}"),
    "ignore_eos": ("scheduler", "Go on behind the model's end tokens."),
    "logprobs": ("executor", f"Log probabilities of the output's tokens, and of that many alternatives. {EAGER}"),
    "prompt_logprobs": (
        "executor",
        "Log probabilities of the prompt's tokens, and of that many alternatives. Nothing of it is taken from the "
        "prefix cache, and logits are computed for each token. Not with `stream`.",
    ),
    "priority": ("scheduler", "With `--scheduling-policy priority`: lower runs first."),
}


def sampling_fields() -> dict[str, Any]:
    """Types and fields, as pydantic's `create_model` takes them."""
    fields = {}
    for parameter in PARAMETERS:
        service, words = _MEANINGS[parameter.name]
        bounds = {"ge": parameter.valid.minimum, "le": parameter.valid.maximum, "gt": parameter.valid.above}
        fields[parameter.name] = (parameter.type | None, field(service, words, parameter.default, **bounds))
    return fields

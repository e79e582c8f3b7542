"""The keys of `--speculative-config`, and checks of their values."""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from pagewire.errors import StartupError

# Most drafts for a request in one step: kernels and recorded steps are made for a few.
MOST_TOKENS = 16


# (what a value must be, a function that checks it)
def _is_whole(least: int, most: int | None = None) -> tuple[str, Any]:
    text = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
    return (
        text,
        lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= (most or value),
    )


_TEXT = ("a string", lambda value: isinstance(value, str))
_KINDS: dict[str, tuple[str, Any]] = {
    "method": _TEXT,
    "model": _TEXT,
    "quantization": _TEXT,
    "revision": _TEXT,
    "num_speculative_tokens": _is_whole(1, MOST_TOKENS),
    "prompt_lookup_max": _is_whole(1),
    "prompt_lookup_min": _is_whole(1),
    "disable_by_batch_size": _is_whole(1),
    "draft_tensor_parallel_size": _is_whole(1),
    "max_model_len": _is_whole(2),
    "suffix_decoding_max_tree_depth": _is_whole(2),
    "suffix_decoding_max_cached_requests": _is_whole(0),
    "suffix_decoding_max_spec_factor": (
        "a number above 0",
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value > 0,
    ),
    "suffix_decoding_min_token_prob": (
        "a number from 0 to 1",
        lambda value: isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1,
    ),
    "adaptive": ("true or false", lambda value: isinstance(value, bool)),
    "num_speculative_tokens_per_batch_size": (
        "a list of [fewest requests, most requests, tokens]",
        lambda value: isinstance(value, list) and all(_is_range(entry) for entry in value),
    ),
}
# Methods with another name in vLLM, and values that have no effect.
_METHODS_OF_VLLM = {"ngram_gpu": "ngram", "eagle": "eagle3"}
_MTP_OF_VLLM = "_mtp"  # names end so, with the model before: deepseek_mtp, mimo_mtp
_WITHOUT_EFFECT = {
    "rejection_sample_method": ("standard", "strict"),
    "draft_sample_method": ("probabilistic", "greedy"),
    "enforce_eager": (False,),
}


def _is_range(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 3
        and all(isinstance(number, int) and not isinstance(number, bool) for number in entry)
        and 1 <= entry[0] <= entry[1]
        and entry[2] >= 0
    )


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that have an effect, with Pagewire's names of methods. Raises StartupError."""
    checked = {}
    for key, value in values.items():
        if value is None:
            continue
        if key in _WITHOUT_EFFECT:
            if value not in _WITHOUT_EFFECT[key]:
                possible = " or ".join(map(json.dumps, _WITHOUT_EFFECT[key]))
                raise StartupError(
                    f"--speculative-config: {key} {json.dumps(value)} is not supported, because drafts never change "
                    f"the distribution of tokens; leave it out, or set it to {possible}"
                )
            continue
        if key not in _KINDS:
            near = difflib.get_close_matches(key, _KINDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_KINDS)}"
            raise StartupError(f"--speculative-config: unknown key {key}; {hint}")
        expected, is_right = _KINDS[key]
        if not is_right(value):
            raise StartupError(f"--speculative-config: {key}: expected {expected}, got {json.dumps(value)}")
        checked[key] = _method(value) if key == "method" else value
    return checked


def _method(name: str) -> str:
    return "mtp" if name.endswith(_MTP_OF_VLLM) else _METHODS_OF_VLLM.get(name, name)

"""Flags of speculative decoding, and the settings that they result in."""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.config.fields import POSITIVE, Range, flag
from pagewire.config.speculation_keys import MOST_TOKENS, checked
from pagewire.errors import StartupError

# The methods: those that look tokens up in texts, those that need a draft model, and those that draft with weights of
# the checkpoint.
LOOKUP_METHODS = ("ngram", "suffix")
DRAFT_MODEL_METHODS = ("draft_model", "self", "eagle3")
METHODS = (*LOOKUP_METHODS, *DRAFT_MODEL_METHODS, "mtp")
_OF_DRAFT_MODEL = {"draft_tensor_parallel_size", "max_model_len", "quantization", "revision"}
# Chooses a method, or none; the same with a copy of the model beside n-grams.
AUTO, WITH_COPY = "auto", "ngram+self"
# Requests from which on a step has no drafts by default: with two cores, such steps gain too little by them.
_DISABLED_BY_DEFAULT = 16


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """The way tokens are drafted; the model checks several drafts in one step."""

    speculative_config: str | None = flag(
        None,
        "how tokens are drafted, as a JSON object with the keys of vLLM; "
        '{"method": "ngram", "num_speculative_tokens": 5} (default: see --spec-method)',
        group="speculation",
        kind="json",
        short="sc",
    )
    spec_method: str = flag(
        AUTO,
        "method that drafts tokens; ngram: continues as the same text did before, suffix: as outputs of other "
        "requests did, too, draft_model, self, eagle3, mtp: with a smaller model, auto: on a CPU, ngram in steps of "
        "fewer than 16 requests, if the model supports drafts, or what other flags name, ngram+self: auto, and in "
        "steps of up to 4 requests a copy in 4 bits of a model with more, as pays, none: no drafts",
        group="speculation",
        choices=(*METHODS, AUTO, WITH_COPY, "none"),
    )
    spec_model: str | None = flag(
        None,
        "draft model; named as for --model, or self:q4: a copy of the model in 4 bits",
        group="speculation",
    )
    spec_tokens: int | None = flag(
        None,
        "maximum number of tokens drafted for a request in one step",
        group="speculation",
        valid=Range(minimum=1, maximum=MOST_TOKENS),
    )
    speculative_model: str | None = flag(
        None, "older name of --spec-model; [ngram] means --spec-method ngram", group="speculation"
    )
    num_speculative_tokens: int | None = flag(
        None,
        "older name of --spec-tokens",
        group="speculation",
        valid=Range(minimum=1, maximum=MOST_TOKENS),
    )
    ngram_prompt_lookup_max: int | None = flag(
        None, "older name of prompt_lookup_max in --speculative-config", group="speculation", valid=POSITIVE
    )
    ngram_prompt_lookup_min: int | None = flag(
        None, "older name of prompt_lookup_min in --speculative-config", group="speculation", valid=POSITIVE
    )
    speculative_disable_by_batch_size: int | None = flag(
        None,
        "older name of disable_by_batch_size in --speculative-config; steps with this many requests have no drafts",
        group="speculation",
        valid=POSITIVE,
    )
    speculative_draft_tensor_parallel_size: int | None = flag(
        None,
        "older name of draft_tensor_parallel_size in --speculative-config",
        group="speculation",
        valid=POSITIVE,
    )
    speculative_max_model_len: int | None = flag(
        None,
        "older name of max_model_len in --speculative-config",
        group="speculation",
        kind="size",
        valid=Range(minimum=2),
    )
    speculative_model_quantization: str | None = flag(
        None, "older name of quantization in --speculative-config", group="speculation"
    )


# Flag -> key of --speculative-config: first the older flags that have no newer flag.
_ONLY_OLDER = {
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
}
_KEYS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
    "speculative_model": "model",
    "num_speculative_tokens": "num_speculative_tokens",
    **_ONLY_OLDER,
}
_NEWER = {
    "speculative_model": "--spec-model (or --spec-method ngram)",
    "num_speculative_tokens": "--spec-tokens",
    **{name: f"--speculative-config '{{\"{key}\": ...}}'" for name, key in _ONLY_OLDER.items()},
}


@dataclass(frozen=True)
class Speculation:
    """The way tokens are drafted. Fields are named like the keys of `--speculative-config`, unless noted otherwise."""

    method: str  # of METHODS
    num_speculative_tokens: int = 5
    model: str = ""
    prompt_lookup_max: int = 8
    prompt_lookup_min: int = 1
    adaptive: bool = True  # draft only as many tokens as pay off
    if_possible: bool = False  # by default: what the setup supports
    with_copy: bool = False  # if possible, a copy of the model drafts, too
    # [(requests, tokens)] in rising order: in steps with at least this many requests, each gets at most this many
    # drafts. From num_speculative_tokens_per_batch_size and disable_by_batch_size.
    draft_bounds: tuple[tuple[int, int], ...] = ()
    draft_tensor_parallel_size: int = 0  # 0 = that of the target
    max_model_len: int = 0  # of the draft model; 0 = that of the target
    quantization: str = ""
    revision: str = ""
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    @classmethod
    def of(cls, config: SpeculationConfig) -> "Speculation | None":
        """Returns the settings, or None for no drafts. Raises StartupError for unknown or contradictory settings."""
        values = _given(config)
        if "none" in (config.spec_method, values.get("method")):
            return None
        if values.get("model") == "[ngram]":
            values |= {"model": "", "method": _same("ngram", values.get("method"), "method")}
        method = values.pop("method", None) or _method_of(str(values.get("model") or ""))
        if method in (AUTO, WITH_COPY):
            if of_model := _OF_DRAFT_MODEL & values.keys():
                source = _source_of(min(of_model), config)
                raise StartupError(f"{source} has no effect without a draft model: add --spec-model, or leave it out")
            if values.get("model"):
                raise StartupError(f"method {method} drafts with the model itself: leave the draft model out")
            method, values["if_possible"], values["with_copy"] = "ngram", True, method == WITH_COPY
            if "num_speculative_tokens_per_batch_size" not in values:
                values.setdefault("disable_by_batch_size", _DISABLED_BY_DEFAULT)
        if method not in METHODS:
            raise StartupError(f"--speculative-config: unknown method {method!r}; choose one of {', '.join(METHODS)}")
        if method in DRAFT_MODEL_METHODS and not values.get("model"):
            raise StartupError(
                f'--speculative-config: method {method} needs a draft model; add "model", named as for --model'
            )
        bounds = _bounds(values.pop("num_speculative_tokens_per_batch_size", None))
        if (most := values.pop("disable_by_batch_size", None)) is not None:
            bounds = (*(bound for bound in bounds if bound[0] < most), (most, 0))
        longest, shortest = values.get("prompt_lookup_max"), values.get("prompt_lookup_min")
        if shortest is not None and longest is None:
            values["prompt_lookup_max"] = max(shortest, cls.prompt_lookup_max)
        if longest is not None and shortest is None:
            values["prompt_lookup_min"] = min(longest, cls.prompt_lookup_min)
        if longest is not None and shortest is not None and shortest > longest:
            raise StartupError(
                f"--speculative-config: prompt_lookup_min {shortest} is above prompt_lookup_max {longest}; lower it"
            )
        return cls(method, draft_bounds=bounds, **values)


def older_flags(config: SpeculationConfig) -> list[str]:
    """Returns a line for each flag that was given by an older name, with the newer one."""
    return [
        f"--{name.replace('_', '-')} is an older name: use {newer}"
        for name, newer in _NEWER.items()
        if getattr(config, name) is not None
    ]


def _given(config: SpeculationConfig) -> dict[str, Any]:
    """Returns the values by key of `--speculative-config`, from all flags."""
    values = checked(_parsed(config.speculative_config)) if config.speculative_config else {}
    if values.get("method") == AUTO:
        del values["method"]
    for name, key in _KEYS.items():
        if (value := getattr(config, name)) not in (None, AUTO):
            values[key] = _same(value, values.get(key), key)
    return values


def _source_of(key: str, config: SpeculationConfig) -> str:
    """Returns the flag, or the key of `--speculative-config`, that gave a value."""
    given = (name for name in _KEYS if _KEYS[name] == key and getattr(config, name) is not None)
    return next((f"--{name.replace('_', '-')}" for name in given), f"--speculative-config: {key}")


def _same(value: Any, other: Any, key: str) -> Any:
    if other is not None and other != value:
        raise StartupError(f"flags of speculative decoding differ: {key} is {value!r} and {other!r}; give one of them")
    return value


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise StartupError(f"--speculative-config: {text!r:.200} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise StartupError(
            '--speculative-config: expected an object, as {"method": "ngram", "num_speculative_tokens": 5}; '
            f"got {text!r:.200}"
        )
    return values


def _method_of(model: str) -> str:
    """Returns the method if only a model is named, or nothing; like vLLM, it follows from the name."""
    if not model:
        return AUTO
    if model == "self" or model.startswith("self:"):
        return "self"
    return "eagle3" if "eagle3" in model.lower() or "eagle-3" in model.lower() else "draft_model"


def _bounds(ranges: list[list[int]] | None) -> tuple[tuple[int, int], ...]:
    """Converts vLLM's ranges of numbers of requests to [requests, tokens]. Raises StartupError if they overlap."""
    if not ranges:
        return ()
    ordered = sorted(ranges)
    for (_, last, _), (first, _, _) in itertools.pairwise(ordered):
        if first <= last:
            raise StartupError(
                f"--speculative-config: num_speculative_tokens_per_batch_size has {first} requests in two ranges"
            )
    return tuple((first, num_tokens) for first, _, num_tokens in ordered)

"""Parameters of rotary position embedding, in the forms of old and new config files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.services.executor.config.load_error import ModelLoadError, wrong_value

_ALIASES = {"su": "longrope", "mrope": "default", "none": "default"}
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
_NUMBERS = (
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
_MAY_BE_ZERO = ("mscale", "mscale_all_dim")
_LISTS = ("short_factor", "long_factor")
# Not parameters of the rotation of text: its tokens have the same position in every section.
_WITHOUT_MEANING = ("type", "finetuned", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class RopeConfig:
    """Fields carry the names of Hugging Face's `rope_parameters`; the formulas are in `layers/rotary.py`.

    `frequency_factors` (one divisor per rotary frequency) comes from GGUF's `rope_freqs.weight` tensor, which holds
    Llama 3 scaling in evaluated form.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0  # the trained length
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope: a divisor per rotary frequency, up to the trained length
    long_factor: tuple[float, ...] = ()  # longrope: the same beyond the trained length
    frequency_factors: tuple[float, ...] | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many dimensions of a head the table of angles covers."""
        if self.rope_type == "proportional":  # the others are turned by 0
            return head_dim
        return int(head_dim * self.partial_rotary_factor)

    def max_supported_len(self, max_position_embeddings: int) -> int:
        """Position scaling stretches the trained length."""
        if self.rope_type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return max_position_embeddings


def rope_config(raw: Mapping[str, Any], layer_type: str | None = None) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_scaling` with a separate `rope_theta` (earlier versions).

    layer_type: the entry of `layer_types` to read if `rope_parameters` has parameters per entry.
    Raises ModelLoadError naming the key for a rope type or parameter that is not implemented.
    """
    source = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    params = raw.get(source) or {}
    if layer_type is not None and isinstance(params, Mapping) and layer_type in params:
        params, source = params[layer_type] or {}, f"{source}.{layer_type}"
    if not isinstance(params, Mapping):
        raise ModelLoadError(f"config key {source}: expected an object, found {params!r:.100}")
    name = params.get("rope_type") or params.get("type") or "default"
    rope_type = _ALIASES.get(str(name), str(name))
    if rope_type not in _REQUIRED:
        raise ModelLoadError(f"config key {source}: rope_type {name!r} is not one of {', '.join(_REQUIRED)}")
    # Old files and some families keep these next to the parameters.
    beside = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if raw.get(key) is not None}
    values = beside | {key: value for key, value in params.items() if value is not None and key != "rope_type"}
    if raw.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    found = {key: _value(f"{source}.{key}", key, value) for key, value in values.items() if key not in _WITHOUT_MEANING}
    for key in _REQUIRED[rope_type]:
        if key not in found:
            raise ModelLoadError(f"config key {source}.{key} is missing for rope_type {rope_type!r}")
    return RopeConfig(rope_type=rope_type, **_lengths(rope_type, raw.get("max_position_embeddings") or 0, found))


def layer_parameters(raw: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """Returns the parameters of an entry of `layer_types`; none if `rope_parameters` is not divided by entry."""
    params = (raw.get("rope_parameters") or {}).get(layer_type) or {}
    if not isinstance(params, Mapping):
        raise wrong_value(f"rope_parameters.{layer_type}", "an object", params)
    return dict(params)


def _lengths(rope_type: str, max_position_embeddings: int, values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the trained length, and with longrope's factor: the model's limit divided by that length."""
    trained = values.get("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "dynamic":  # stretches what config.json states as the limit
        trained = max_position_embeddings
    if rope_type == "longrope":
        if not trained:
            raise ModelLoadError("config key original_max_position_embeddings is missing for rope_type 'longrope'")
        values = {"factor": max_position_embeddings / trained} | values
    return values | {"original_max_position_embeddings": trained}


def _value(source: str, key: str, value: Any) -> float | bool | tuple[float, ...]:
    if key == "truncate" and isinstance(value, bool):
        return value
    if key in _LISTS and isinstance(value, list) and all(map(_is_positive, value)):
        return tuple(value)
    if key == "partial_rotary_factor" and _is_positive(value) and value > 1:
        raise ModelLoadError(f"config key {source}: expected a share of the head, up to 1, found {value!r:.100}")
    if (key in _NUMBERS and _is_positive(value)) or (key in _MAY_BE_ZERO and (value == 0 or _is_positive(value))):
        number: float = value
        return number
    if key in ("truncate", *_LISTS, *_NUMBERS, *_MAY_BE_ZERO):
        expected = "true or false" if key == "truncate" else "positive numbers" if key in _LISTS else "a number above 0"
        raise ModelLoadError(f"config key {source}: expected {expected}, found {value!r:.100}")
    raise ModelLoadError(f"config key {source} is not supported; remove it if the model does not need it")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0

"""The valid values of keys of config.json, for every key that a model file reads without its own check.

Sizes that all models need are checked where they are read (`required`), as are values that depend on other keys. A
value of a wrong kind is refused here, before a model file reads it; a null key counts as missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.services.executor.config.load_error import wrong_value

_MAX_COUNT = 1 << 28  # of anything: a product of two does not overflow
_MAX_LAYERS = 1 << 16


@dataclass(frozen=True)
class _Kind:
    expected: str
    fits: Callable[[Any], bool]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _list_of(expected: str, fits: Callable[[Any], bool]) -> _Kind:
    return _Kind(f"a list of {expected}", lambda value: isinstance(value, list) and all(map(fits, value)))


_SWITCH = _Kind("true or false", lambda value: isinstance(value, bool))
_NAME = _Kind("a name", lambda value: isinstance(value, str))
_OBJECT = _Kind("an object", lambda value: isinstance(value, Mapping))
_COUNT = _Kind(f"an integer from 0 to {_MAX_COUNT}", lambda value: _is_int(value) and 0 <= value <= _MAX_COUNT)
_SIZE = _Kind(f"a positive integer up to {_MAX_COUNT}", lambda value: _is_int(value) and 0 < value <= _MAX_COUNT)
_LAYERS = _Kind("a number of layers", lambda value: _is_int(value) and 0 < value <= _MAX_LAYERS)
_NUMBER = _Kind("a positive number", lambda value: _is_number(value) and value > 0)
_NUMBER_OR_ZERO = _Kind("a number from 0 on", lambda value: _is_number(value) and value >= 0)

_KEYS: Mapping[_Kind, tuple[str, ...]] = {
    _SWITCH: (
        "add_cross_attention",
        "alibi",
        "attention_bias",
        "attention_out_bias",
        "bias",
        "classifier_bias",
        "is_decoder",
        "kv_b_proj_is_split",
        "mlp_bias",
        "multi_query",
        "new_decoder_architecture",
        "norm_bias",
        "norm_topk_prob",
        "parallel_attn",
        "qk_layernorm",
        "qkv_bias",
        "residual_in_fp32",
        "rope_interleave",
        "scale_attn_by_inverse_layer_idx",
        "scale_attn_weights",
        "tie_word_embeddings",
        "transposed",
        "use_bias",
        "use_bidirectional_attention",
        "use_conv_bias",
        "use_parallel_residual",
        "use_qk_norm",
        "use_sliding_window",
    ),
    _NAME: (
        "activation",
        "activation_function",
        "classifier_activation",
        "classifier_pooling",
        "hidden_act",
        "hidden_activation",
        "position_embedding_type",
        "topk_method",
    ),
    _OBJECT: ("id2label", "rope_parameters", "rope_scaling", "text_config", "vision_config"),
    _COUNT: ("first_k_dense_replace", "first_position", "max_window_layers", "pad_token_id"),
    _SIZE: ("global_attn_every_n_layers", "local_attention", "num_labels", "sliding_window_pattern"),
    _LAYERS: ("n_layer", "num_hidden_layers"),
    _NUMBER: (
        "global_rope_theta",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "local_rope_theta",
        "norm_eps",
        "rms_norm_eps",
        "rope_local_base_freq",
        "rope_theta",
        "rotary_emb_base",
        "routed_scaling_factor",
        "swiglu_alpha",
        "swiglu_limit",
    ),
    _NUMBER_OR_ZERO: ("attn_logit_softcapping", "final_logit_softcapping"),
    _list_of("names", lambda value: isinstance(value, str)): ("layer_types",),
    _list_of("layer numbers", lambda value: _is_int(value) and value >= 0): ("mlp_only_layers",),
    _list_of("0 and 1", lambda value: _is_int(value) and value in (0, 1)): ("no_rope_layers",),
}
_KIND_OF = {key: kind for kind, keys in _KEYS.items() for key in keys}
_NULL_IS_A_VALUE = ("attn_logit_softcapping", "final_logit_softcapping")  # no cap; a family may have one by default
_NESTED = ("text_config", "vision_config")


def checked_keys(raw: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Returns the keys of a config.json that are not null. Raises ModelLoadError naming a key, its invalid value and
    the expected kind. place: of `raw` within config.json, such as "text_config."."""
    found = {}
    for key, value in raw.items():
        kind = _KIND_OF.get(key)
        if kind is not None and value is None and key not in _NULL_IS_A_VALUE:
            continue
        if kind is not None and value is not None and not kind.fits(value):
            raise wrong_value(f"{place}{key}", kind.expected, value)
        found[key] = checked_keys(value, f"{place}{key}.") if key in _NESTED and value is not None else value
    return found

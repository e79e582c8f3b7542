"""The configuration of a model: one frozen value, independent of the kind of file it was read from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from pagewire.services.executor.config.load_error import ModelLoadError, wrong_value
from pagewire.services.executor.config.rope_config import RopeConfig, rope_config

_MAX_SIZE = 1 << 28  # Largest dimension of a tensor, far beyond any model's: a product of two does not overflow.


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The part of a configuration that all models have."""

    architecture: str  # Hugging Face class name, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int  # the model's own limit; the served limit (`max_model_len`) is not part of it
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()
    tie_word_embeddings: bool = False  # the head is the embedding
    pooling: str | None = None  # how a GGUF file says to make vectors; other checkpoints have files for that

    @property
    def max_supported_len(self) -> int:
        """Longest `max_model_len` the positions are defined for."""
        return self.max_position_embeddings

    def untied(self) -> Self:
        """The same for a model with a head apart from its embedding."""
        return replace(self, tie_word_embeddings=False)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Shape and constants of a decoder with one kind of layer, such as Llama's.

    `sliding_windows` has one entry per layer: the number of keys a query sees including itself, 0 = all.
    """

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: tuple[int, ...]
    rope: RopeConfig = field(default_factory=RopeConfig)
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim)
        if max(sizes) > _MAX_SIZE:
            raise ModelLoadError(
                f"vocab_size, hidden_size, intermediate_size or num_attention_heads * head_dim is above {_MAX_SIZE}: "
                f"{', '.join(map(str, sizes))}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads ({self.num_heads}) is not a multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if not self.head_dim:
            raise ModelLoadError(
                f"hidden_size ({self.hidden_size}) is smaller than num_attention_heads ({self.num_heads}), and there "
                "is no head_dim"
            )
        if len(self.sliding_windows) != self.num_layers:
            raise ModelLoadError(
                f"layer_types names {len(self.sliding_windows)} layers, num_hidden_layers is {self.num_layers}"
            )

    @property
    def max_supported_len(self) -> int:
        return self.rope.max_supported_len(self.max_position_embeddings)


def decoder_config(raw: Mapping[str, Any], dtype: torch.dtype, **family: Any) -> DecoderConfig:
    """Returns the configuration with `decoder_values`; `family` holds the fields that an architecture adds."""
    return DecoderConfig(**(decoder_values(raw, dtype) | family))


def decoder_values(raw: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The fields of a DecoderConfig, from the keys that all Llama-like `config.json` files share.

    Raises ModelLoadError naming the key when one is missing or has a value we do not implement.
    """
    num_heads = required(raw, "num_attention_heads")
    hidden_size = required(raw, "hidden_size")
    num_layers = required(raw, "num_hidden_layers")
    return {
        "architecture": raw["architectures"][0],
        "vocab_size": required(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": required(raw, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": optional(raw, "num_key_value_heads", num_heads),
        "head_dim": optional(raw, "head_dim", hidden_size // num_heads),
        "max_position_embeddings": required(raw, "max_position_embeddings"),
        "sliding_windows": (0,) * num_layers,
        "dtype": dtype,
        "rope": rope_config(raw),
        "rms_norm_eps": positive_number(raw, "rms_norm_eps", 1e-6),
        "hidden_act": raw.get("hidden_act", "silu"),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "eos_token_ids": token_ids(raw.get("eos_token_id")),
    }


def required(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_SIZE:
        raise wrong_value(key, f"a positive integer up to {_MAX_SIZE}", value)
    return value


def optional(raw: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a positive integer; the key may be missing or null."""
    return default if raw.get(key) is None else required(raw, key)


def positive_number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Returns a positive float; the key may be missing or null. JSON as Python writes it may hold NaN and Infinity."""
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong_value(key, "a positive number", value)
    return float(value)


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` as written in config files: an int, a list or null."""
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in values):
        raise ModelLoadError(f"config key eos_token_id: expected a token id or a list of them, found {value!r:.100}")
    return tuple(values)


def sliding_window(raw: Mapping[str, Any], default: int = 0) -> int:
    """Number of keys that a query sees; 0, like null, means all. default: the value if the key is missing."""
    stated = {"sliding_window": default, **raw}
    return 0 if stated["sliding_window"] == 0 else optional(stated, "sliding_window", 0)


def layer_windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Sliding window per layer as Qwen configs state it: `layer_types`, or all layers from `max_window_layers` on."""
    num_layers = required(raw, "num_hidden_layers")
    window = sliding_window(raw, 4096) if raw.get("use_sliding_window", False) else 0
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer_idx >= first else 0 for layer_idx in range(num_layers))
    windows = {"full_attention": 0, "sliding_attention": window}
    for layer_type in layer_types:
        if layer_type not in windows:
            raise ModelLoadError(f"config key layer_types: {layer_type!r} is not one of {', '.join(windows)}")
    return tuple(windows[layer_type] for layer_type in layer_types)

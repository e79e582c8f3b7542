"""What is known about a model before it is made: one frozen value, whatever file it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagewire.errors import StartupError


class ModelLoadError(StartupError):
    """A model cannot be loaded as asked; the message names the file, key or tensor and the remedy."""


_MAX_SIZE = 1 << 28  # of a tensor's dimension, far beyond any model's: products of two are still no overflow


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding parameters; the formulas are in `layers/rotary.py`.

    Fields carry the names of Hugging Face's `rope_parameters`. `frequency_factors` (one divisor per rotary
    frequency) comes from GGUF's `rope_freqs.weight` tensor, which holds Llama 3 scaling in evaluated form.
    """

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    frequency_factors: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is known of any model, whatever it computes."""

    architecture: str  # Hugging Face class name, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int  # the model's own limit; the served limit (`max_model_len`) is not part of it
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...] = ()

    @property
    def max_supported_len(self) -> int:
        """Longest `max_model_len` the positions are defined for."""
        return self.max_position_embeddings


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Shape and constants of a decoder with one kind of layer, as Llama's.

    `sliding_windows` has one entry per layer: the number of keys a query sees including itself, 0 = all.
    """

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_windows: tuple[int, ...]
    rope: RopeConfig = RopeConfig()
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False

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
        if len(self.sliding_windows) != self.num_layers:
            raise ModelLoadError(
                f"layer_types names {len(self.sliding_windows)} layers, num_hidden_layers is {self.num_layers}"
            )

    @property
    def max_supported_len(self) -> int:
        """Position scaling stretches the trained length."""
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            stretched = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, stretched)
        return self.max_position_embeddings


def decoder_config(raw: Mapping[str, Any], dtype: torch.dtype, **family: Any) -> DecoderConfig:
    """Reads the keys that all Llama-like `config.json` files share; `family` holds what an architecture adds.

    Raises ModelLoadError naming the key when one is missing or has a value we do not implement.
    """
    num_heads = required(raw, "num_attention_heads")
    hidden_size = required(raw, "hidden_size")
    num_layers = required(raw, "num_hidden_layers")
    values: dict[str, Any] = {
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
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "hidden_act": raw.get("hidden_act", "silu"),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "eos_token_ids": token_ids(raw.get("eos_token_id")),
    }
    return DecoderConfig(**(values | family))


def required(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelLoadError(f"config key {key}: expected a positive integer, found {value!r}")
    return value


def optional(raw: Mapping[str, Any], key: str, default: int) -> int:
    """As `required`, but the key may be missing or null."""
    return default if raw.get(key) is None else required(raw, key)


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` as written in config files: an int, a list or null."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_ROPE_NUMBERS = (
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_ROPE_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def rope_config(raw: Mapping[str, Any]) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_scaling` with `rope_theta` beside it (before).

    Raises ModelLoadError naming the key for a rope type or parameter that is not implemented.
    """
    source = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    params = dict(raw.get(source) or {})
    rope_type = params.pop("rope_type", None) or params.get("type") or "default"
    if rope_type not in _ROPE_TYPES:
        raise ModelLoadError(f"config key {source}: rope_type {rope_type!r} is not one of {', '.join(_ROPE_TYPES)}")
    for name in ("type", "finetuned"):
        params.pop(name, None)
    values: dict[str, Any] = {"rope_type": rope_type}
    values["rope_theta"] = float(params.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    if raw.get("partial_rotary_factor") is not None:
        params.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    for name, value in params.items():
        if name not in _ROPE_NUMBERS:
            raise ModelLoadError(f"config key {source}.{name} is not supported for rope_type {rope_type!r}")
        if value is not None:
            values[name] = value
    for name in _ROPE_REQUIRED.get(rope_type, ()):
        if name not in values:
            raise ModelLoadError(f"config key {source}.{name} is missing for rope_type {rope_type!r}")
    if raw.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    values.setdefault("original_max_position_embeddings", raw.get("max_position_embeddings", 0))
    return RopeConfig(**values)


def layer_windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Sliding window per layer as Qwen configs state it: `layer_types`, or all layers from `max_window_layers` on."""
    num_layers = required(raw, "num_hidden_layers")
    window = (raw.get("sliding_window", 4096) or 0) if raw.get("use_sliding_window", False) else 0
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer_idx >= first else 0 for layer_idx in range(num_layers))
    windows = {"full_attention": 0, "sliding_attention": window}
    for layer_type in layer_types:
        if layer_type not in windows:
            raise ModelLoadError(f"config key layer_types: {layer_type!r} is not one of {', '.join(windows)}")
    return tuple(windows[layer_type] for layer_type in layer_types)

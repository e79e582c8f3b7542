"""Mamba-2: layers that only keep a state, instead of keys and values.

for each layer:  stream += mixer(norm(stream))          (`layers/state_space.py`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import (
    ModelConfig,
    ModelLoadError,
    optional,
    positive_number,
    required,
    token_ids,
)
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.state_space import Mamba2Mixer, StateSpaceConfig
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext

# A state takes in any number of tokens: files have no limit, and this one only bounds rows. --max-model-len raises it.
_DEFAULT_LEN, _MAX_LEN = 8192, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(ModelConfig):
    num_layers: int
    norm_eps: float
    residual_in_fp32: bool  # the stream
    mixer: StateSpaceConfig

    @property
    def max_supported_len(self) -> int:
        return _MAX_LEN


def mamba2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> Mamba2Config:
    """Reads the keys of transformers. Raises ModelLoadError."""
    hidden_size, eps = required(raw, "hidden_size"), positive_number(raw, "layer_norm_epsilon", 1e-5)
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelLoadError(f"config key hidden_act: {activation!r} is not silu")
    mixer = StateSpaceConfig(
        num_heads=required(raw, "num_heads"),
        head_dim=required(raw, "head_dim"),
        state_size=required(raw, "state_size"),
        num_groups=optional(raw, "n_groups", 8),
        conv_width=optional(raw, "conv_kernel", 4),
        dt_limit=_dt_limit(raw),
        norm_eps=eps,
        bias=raw.get("use_bias", False),
        conv_bias=raw.get("use_conv_bias", True),
    )
    if mixer.inner_size != (stated := optional(raw, "expand", 2) * hidden_size):
        raise ModelLoadError(f"num_heads * head_dim is {mixer.inner_size}, expand * hidden_size {stated}: not the same")
    return Mamba2Config(
        architecture=raw["architectures"][0],
        vocab_size=required(raw, "vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=optional(raw, "max_position_embeddings", _DEFAULT_LEN),
        dtype=dtype,
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        num_layers=required(raw, "num_hidden_layers"),
        norm_eps=eps,
        residual_in_fp32=raw.get("residual_in_fp32", True),
        mixer=mixer,
    )


def _dt_limit(raw: Mapping[str, Any]) -> tuple[float, float]:
    """`time_step_limit`. JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    limits = raw.get("time_step_limit") or (0.0, math.inf)
    try:
        least, most = (float(limit["__float__"] if isinstance(limit, Mapping) else limit) for limit in limits)
        if not 0 <= least < most:
            raise ValueError
    except (TypeError, ValueError, KeyError):
        raise ModelLoadError(
            f"config key time_step_limit: expected two rising numbers, found {limits!r:.100}"
        ) from None
    return least, most


class Mamba2Layer:
    __slots__ = ("mixer", "norm")

    def __init__(self, layer_idx: int, config: Mamba2Config, placement: Placement) -> None:
        self.norm = RMSNorm("norm", config.hidden_size, config.norm_eps, placement)
        self.mixer = Mamba2Mixer(layer_idx, config.mixer, config.hidden_size, placement.within("mixer"))

    def __call__(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        return self.mixer(self.norm.add(hidden, residual), context)

    def leaves(self) -> Iterator[Leaf]:
        yield self.norm
        yield from self.mixer.leaves()


class Mamba2Model(CausalModel):
    unsplit = "its layers keep one state for all heads of a group; use replicas"

    def __init__(self, config: Mamba2Config, max_model_len: int, placement: Placement) -> None:
        placement = placement.narrowed()
        body, size, stage = placement.within("backbone"), config.hidden_size, placement.stage
        tied = config.tie_word_embeddings
        self.config: Mamba2Config = config
        self.stage = stage
        self.stream_dtype = torch.float32 if config.residual_in_fp32 else None
        has_embedding = stage.is_first or (tied and stage.is_last)
        self.embed = Embedding("embeddings", config.vocab_size, size, body.where(has_embedding), projects=tied)
        self.layers: list[Mamba2Layer] = [
            Mamba2Layer(layer_idx, config, body.within(f"layers.{layer_idx}"))
            for layer_idx in stage.layers(config.num_layers)
        ]
        self.norm = RMSNorm("norm_f", size, config.norm_eps, body.where(stage.is_last))
        head = placement.where(stage.is_last)
        self.lm_head = None if tied else Linear(size, {"lm_head": config.vocab_size}, head, bias=False)

    def finish_loading(self) -> None:
        for layer in self.layers:
            layer.mixer.state_space.finish_loading()


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces the converter's "arbitrary" length of 2**20, which is too long for rows of requests."""
    inner_size, num_heads = keys["inner_size"], keys["num_heads"]
    if inner_size % num_heads or inner_size % keys["hidden_size"]:
        raise ModelLoadError(
            f"ssm.inner_size ({inner_size}) is not a multiple of ssm.time_step_rank ({num_heads}) and of "
            f"embedding_length ({keys['hidden_size']})"
        )
    return {
        "head_dim": inner_size // num_heads,
        "expand": inner_size // keys["hidden_size"],
        "max_position_embeddings": min(keys["max_position_embeddings"], _DEFAULT_LEN),
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in stated,
    }


def _flat(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (math.prod(shape),)


def _logarithm(a: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(-a)


# The form that llama.cpp's converter writes (`conversion/mamba.py`).
_GGUF = GgufForm(
    "mamba2",
    attends=False,
    layers="backbone.layers",
    names={
        "token_embd": "backbone.embeddings",
        "output_norm": "backbone.norm_f",
        "output": "lm_head",
        "attn_norm": "norm",
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_dt.bias": "mixer.dt_bias",
        "ssm_a": "mixer.A_log",
        "ssm_d": "mixer.D",
        "ssm_norm": "mixer.norm",
        "ssm_out": "mixer.out_proj",
    },
    shapes={
        ".conv1d.weight": lambda shape: (shape[0], 1, *shape[1:]),
        ".A_log": _flat,
        ".D": _flat,
        ".mixer.norm.weight": _flat,
    },
    values={".A_log": _logarithm},
    sizes={
        "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": "inner_size",
        "ssm.state_size": "state_size",
        "ssm.time_step_rank": "num_heads",
        "ssm.group_count": "n_groups",
    },
    numbers={"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"},
    derived_keys=_gguf_keys,
)

ARCHITECTURES = (
    Architecture(
        "Mamba2ForCausalLM",
        "mamba2",
        mamba2_config,
        Mamba2Model,
        _GGUF,
        base="backbone.",
        # For files as old as the model.
        prefixes={"backbone.embedding.": "backbone.embeddings."},
        example={"num_heads": 32, "head_dim": 64, "n_groups": 1},
    ),
)

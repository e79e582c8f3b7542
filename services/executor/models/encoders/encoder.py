"""Encoders: models that read whole texts and generate no text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.config.model_config import ModelConfig, ModelLoadError, optional, required
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.step.step_context import StepContext

ACTIVATIONS = {"gelu": ops.gelu, "gelu_new": ops.gelu_tanh, "gelu_pytorch_tanh": ops.gelu_tanh}


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """The common keys of the configs of encoders."""

    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    hidden_act: str = "gelu"
    num_labels: int = 0  # of its classification head; 0 = it has none

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ModelLoadError(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads ({self.num_heads})"
            )
        check_activation("hidden_act", self.hidden_act)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def check_activation(key: str, name: str) -> None:
    """Raises ModelLoadError for an unsupported activation."""
    if name not in ACTIVATIONS:
        raise ModelLoadError(f"config key {key}: {name!r} is not one of {', '.join(ACTIVATIONS)}")


def encoder_keys(raw: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the fields with the same names in every encoder's `config.json`. Raises ModelLoadError naming the key."""
    architecture = raw["architectures"][0]
    return {
        "architecture": architecture,
        "vocab_size": required(raw, "vocab_size"),
        "hidden_size": required(raw, "hidden_size"),
        "intermediate_size": required(raw, "intermediate_size"),
        "num_layers": required(raw, "num_hidden_layers"),
        "num_heads": required(raw, "num_attention_heads"),
        "dtype": dtype,
        "num_labels": num_labels(raw) if architecture.endswith("ForSequenceClassification") else 0,
    }


def num_labels(raw: Any) -> int:
    """Returns the number of labels as transformers counts them: `id2label` wins, and two is the default."""
    return len(raw.get("id2label") or ()) or optional(raw, "num_labels", 2)


class EncoderModel(OwnModel):
    """A model without a KV cache and without an output head over the vocabulary."""

    generates = False
    unsplit = "encoders are small, and each rank would need all tokens of a text; use replicas"

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError(f"{self.config.architecture} is an encoder: no token is sampled from it")


def token_types(context: StepContext) -> Tensor:
    """int64 [num_tokens]: 0, or 1 for tokens of the second text of a pair."""
    starts = context.second_text_start
    if starts is None:
        return torch.zeros_like(context.positions)
    place = torch.arange(len(context.positions), device=starts.device, dtype=torch.int32)
    request = torch.bucketize(place, context.query_start_loc[1:], right=True).clamp_max_(len(context.rows) - 1)
    rows = context.rows.clamp_min(0).index_select(0, request)
    return (context.positions >= starts.index_select(0, rows)).long()

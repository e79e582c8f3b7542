"""Gemma 2: every other layer sees a window, scores and logits are capped softly, and each half of a layer is normalised
before and after.

Norms multiply by one plus their weight, and embeddings by the square root of their size, rounded as transformers does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import (
    DecoderConfig,
    ModelLoadError,
    decoder_values,
    layer_windows,
    required,
)
from pagewire.services.executor.layers.attention.self_attention import llama_attention
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import output_head
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.norm import UnitOffsetRMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.models.architecture import DECODER_NAMES, Architecture, GgufForm
from pagewire.services.executor.models.causal import Observer
from pagewire.services.executor.models.protocol import Leaf, OwnModel
from pagewire.services.executor.step.step_context import StepContext


@dataclass(frozen=True, kw_only=True)
class GemmaConfig(DecoderConfig):
    """The common part of Gemma 2 and 3."""

    attention_scale: float  # of scores
    attention_soft_cap: float  # 0 = off, also below
    final_soft_cap: float  # of logits


class GemmaLayer:
    """Attention and feed-forward, each between two norms. `hidden` enters and leaves normalised for its reader."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm", "post_mlp_norm", "pre_mlp_norm")

    def __init__(self, config: GemmaConfig, layer_idx: int, rotary: RotaryEmbedding, placement: Placement) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = UnitOffsetRMSNorm("input_layernorm", size, eps, placement)
        self.attention = llama_attention(
            config,
            layer_idx,
            rotary,
            placement.within("self_attn"),
            scale=config.attention_scale,
            soft_cap=config.attention_soft_cap,
            norm=UnitOffsetRMSNorm,
        )
        self.post_attention_norm = UnitOffsetRMSNorm("post_attention_layernorm", size, eps, placement)
        self.pre_mlp_norm = UnitOffsetRMSNorm("pre_feedforward_layernorm", size, eps, placement)
        self.mlp = GatedMLP(config, placement.within("mlp"))
        self.post_mlp_norm = UnitOffsetRMSNorm("post_feedforward_layernorm", size, eps, placement)

    def __call__(self, hidden: Tensor, residual: Tensor, next_norm: UnitOffsetRMSNorm, context: StepContext) -> Tensor:
        """hidden: `residual` after the layer's input norm. next_norm: normalises the result."""
        hidden = self.attention(hidden, context)
        hidden = self.post_attention_norm.add_before(self.pre_mlp_norm, hidden, residual)
        return self.post_mlp_norm.add_before(next_norm, self.mlp(hidden), residual)

    def leaves(self) -> Iterator[Leaf]:
        yield self.input_norm
        yield from self.attention.leaves()
        yield from (self.post_attention_norm, self.pre_mlp_norm)
        yield from self.mlp.leaves()
        yield self.post_mlp_norm


class GemmaModel(OwnModel):
    """A decoder of `GemmaLayer`s; `rotary` has the positions of each.

    The output of a stage is normalised for the next stage, too.
    """

    hidden_dtype: torch.dtype  # of what layers give
    stream_dtype: torch.dtype  # of the residual stream
    observer: Observer | None = None
    arriving: Callable[[Sequence[GemmaLayer]], Iterable[GemmaLayer]] = iter  # as in `CausalModel`

    def __init__(self, config: GemmaConfig, rotary: Sequence[RotaryEmbedding], placement: Placement) -> None:
        size, stage, tied = config.hidden_size, placement.stage, config.tie_word_embeddings
        body = placement.within("model")
        self.config: GemmaConfig = config
        self.stage = stage
        self.hidden_dtype, self.stream_dtype = placement.result_dtype, placement.stream_dtype
        embedding = body.where(stage.is_first or (tied and stage.is_last))
        self.embed = Embedding("embed_tokens", config.vocab_size, size, embedding, projects=tied, split=True)
        self.embedding_scale = float(torch.tensor(size**0.5, dtype=placement.result_dtype))
        self.layers = [
            GemmaLayer(config, layer_idx, rotary[layer_idx], body.within(f"layers.{layer_idx}"))
            for layer_idx in stage.layers(config.num_layers)
        ]
        # The norm of the last layer's output: the model's, or that of the next stage's first layer.
        reader = ("norm", body) if stage.is_last else ("input_layernorm", body.within(f"layers.{stage.end_layer}"))
        self.norm = UnitOffsetRMSNorm(reader[0], size, config.rms_norm_eps, reader[1])
        head, sizes = placement.where(stage.is_last), {"lm_head": config.vocab_size}
        self.lm_head = None if tied else output_head(size, sizes, head)

    def leaves(self) -> Iterator[Leaf]:
        if self.stage.is_first or (self.stage.is_last and self.lm_head is None):
            yield self.embed
        for layer in self.layers:
            yield from layer.leaves()
        yield self.norm
        if self.lm_head is not None and self.stage.is_last:
            yield self.lm_head

    def finish_loading(self) -> None:
        for leaf in self.leaves():
            if isinstance(leaf, UnitOffsetRMSNorm):
                leaf.finish_loading()

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        stream = context.stream
        if self.stage.is_first:
            hidden = self.embed(input_ids).mul_(self.embedding_scale)
            residual = torch.zeros_like(hidden, dtype=self.stream_dtype) if stream is None else stream.residual.zero_()
            hidden = self.layers[0].input_norm.add(hidden, residual)
        else:
            assert stream is not None
            hidden, residual = stream.hidden, stream.residual
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer_idx, (layer, next_norm) in enumerate(zip(self.arriving(self.layers), next_norms, strict=True)):
            if self.observer is not None:
                self.observer.see(layer_idx, residual.clone, context)
            hidden = layer(hidden, residual, next_norm, context)
        if self.observer is not None:
            self.observer.end(hidden, context)
        return hidden if stream is None or self.stage.is_last else stream.hidden.copy_(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits = self.embed.project(hidden) if self.lm_head is None else self.lm_head(hidden)
        cap = self.config.final_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def ignored(self, name: str) -> bool:
        tied_copy = self.config.tie_word_embeddings and name.endswith("lm_head.weight")
        return tied_copy or name.endswith("rotary_emb.inv_freq")


class Gemma2Model(GemmaModel):
    def __init__(self, config: GemmaConfig, max_model_len: int, placement: Placement) -> None:
        rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, placement.device)
        super().__init__(config, [rotary] * config.num_layers, placement)


def gemma_values(raw: Mapping[str, Any], dtype: torch.dtype, *, full_attention_every: int) -> dict[str, Any]:
    """Returns the fields of a GemmaConfig. full_attention_every: without layer_types, the last of this many layers has
    no window.
    """
    if raw.get("use_bidirectional_attention"):
        raise ModelLoadError(
            "config key use_bidirectional_attention: only causal attention is supported; use another model"
        )
    num_layers = required(raw, "num_hidden_layers")
    layer_types = raw.get("layer_types") or [
        "sliding_attention" if (layer_idx + 1) % full_attention_every else "full_attention"
        for layer_idx in range(num_layers)
    ]
    attention_bias = raw.get("attention_bias", False)
    return decoder_values(raw, dtype) | {
        "sliding_windows": layer_windows({**raw, "use_sliding_window": True, "layer_types": layer_types}),
        "hidden_act": raw.get("hidden_activation") or "gelu_pytorch_tanh",
        "tie_word_embeddings": raw.get("tie_word_embeddings", True),
        "qkv_bias": attention_bias,
        "attention_output_bias": attention_bias,
        "attention_scale": required(raw, "query_pre_attn_scalar") ** -0.5,
        "attention_soft_cap": raw.get("attn_logit_softcapping") or 0.0,
        "final_soft_cap": raw.get("final_logit_softcapping") or 0.0,
    }


# Defaults of transformers' Gemma2Config, as published files omit keys.
_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def gemma2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> GemmaConfig:
    return GemmaConfig(**gemma_values(_DEFAULTS | dict(raw), dtype, full_attention_every=2))


def gemma_query_scalar(keys: Mapping[str, Any], layers_of_27b: int) -> int:
    """Returns the scale that llama.cpp derives from the number of layers: scores of the 27B models are not scaled by
    the size of a head."""
    if keys["num_hidden_layers"] == layers_of_27b:
        return int(keys["hidden_size"]) // int(keys["num_attention_heads"])
    return int(keys["head_dim"])


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    return {"query_pre_attn_scalar": gemma_query_scalar(keys, layers_of_27b=46)}


GEMMA_NAMES = {
    **DECODER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

ARCHITECTURES = (
    Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        gemma2_config,
        Gemma2Model,
        GgufForm(
            "gemma2",
            names=GEMMA_NAMES,
            norms_with_one=True,
            numbers={
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            derived_keys=_gguf_keys,
        ),
    ),
)

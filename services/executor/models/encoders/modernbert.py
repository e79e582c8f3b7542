"""ModernBERT: pre-norm, rotary positions, windows in most layers, gated feed-forward, no biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.config.model_config import ModelLoadError, positive_number, required
from pagewire.services.executor.config.rope_config import layer_parameters
from pagewire.services.executor.layers import pooling
from pagewire.services.executor.layers.attention.encoder_attention import EncoderAttention
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.norm import LayerNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.pooling import Spans
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.encoders.encoder import (
    ACTIVATIONS,
    EncoderConfig,
    EncoderModel,
    check_activation,
    encoder_keys,
)
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext


@dataclass(frozen=True, kw_only=True)
class ModernBertConfig(EncoderConfig):
    is_local: tuple[bool, ...]  # by layer: it sees a window, and has separate rotary positions
    window: int  # number of tokens that a local layer sees on either side
    global_rope_theta: float
    local_rope_theta: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    classifier_bias: bool
    classifier_act: str
    classifier_pooling: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation("classifier_activation", self.classifier_act)


def rotary_table(theta: float, head_dim: int, max_len: int, device: torch.device) -> Tensor:
    """fp32 [max_len, head_dim]: cosines, then sines."""
    if device.type == "meta":
        return torch.empty(max_len, head_dim, device=device)
    frequencies = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / -head_dim)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)


class ModernBertLayer:
    """Each half returns its output not yet added to the residual stream."""

    def __init__(self, config: ModernBertConfig, layer_idx: int, rotary: Tensor, placement: Placement) -> None:
        size, eps, bias = config.hidden_size, config.norm_eps, config.norm_bias
        attention, mlp = placement.within("attn"), placement.within("mlp")
        # The first layer's input is normalised by the embeddings.
        self.attention_norm = LayerNorm("attn_norm", size, eps, placement, bias=bias) if layer_idx else None
        self.qkv = Linear(size, {"Wqkv": 3 * size}, attention, bias=config.attention_bias)
        self.rotary = rotary
        window = config.window if config.is_local[layer_idx] else 0
        self.attention = EncoderAttention(config.num_heads, config.head_dim, window)
        self.attention_output = Linear(size, {"Wo": size}, attention, bias=config.attention_bias)
        self.mlp_norm = LayerNorm("mlp_norm", size, eps, placement, bias=bias)
        self.gate_up = Linear(size, {"Wi": 2 * config.intermediate_size}, mlp, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.down = Linear(config.intermediate_size, {"Wo": size}, mlp, bias=config.mlp_bias)

    def __call__(self, hidden: Tensor, residual: Tensor, context: StepContext) -> Tensor:
        """hidden: the output of the previous layer, which is added to `residual` in place."""
        if self.attention_norm is not None:
            hidden = self.attention_norm.add(hidden, residual)
        heads = self.attention.heads(self.qkv(hidden))
        ops.rotate(context.positions, heads.narrow(1, 0, 2 * self.attention.num_heads), self.rotary)
        attended = self.attention_output(self.attention(heads, context))
        gate, up = self.gate_up(self.mlp_norm.add(attended, residual)).chunk(2, dim=-1)
        return self.down(self.activation(gate, None) * up)

    def leaves(self) -> Iterator[Leaf]:
        if self.attention_norm is not None:
            yield self.attention_norm
        yield from (self.qkv, self.attention_output, self.mlp_norm, self.gate_up, self.down)


class ModernBertClassifier:
    """A layer with activation and norm, then the scores, of the first token or of the mean of all."""

    def __init__(self, config: ModernBertConfig, placement: Placement) -> None:
        size = config.hidden_size
        self.pool = {"cls": pooling.first_token, "mean": pooling.mean}[config.classifier_pooling]
        self.dense = Linear(size, {"head.dense": size}, placement, bias=config.classifier_bias)
        self.activation = ACTIVATIONS[config.classifier_act]
        self.norm = LayerNorm("head.norm", size, config.norm_eps, placement, bias=config.norm_bias)
        self.out = Linear(size, {"classifier": config.num_labels}, placement, bias=True)
        self.num_labels = config.num_labels

    def classify(self, hidden: Tensor, spans: Spans) -> Tensor:
        pooled = self.pool(hidden, spans).to(hidden.dtype)
        return self.out(self.norm(self.activation(self.dense(pooled), None)))

    def leaves(self) -> Iterator[Leaf]:
        yield from (self.dense, self.norm, self.out)


class ModernBertModel(EncoderModel):
    """The encoder, with a classification head if the config has labels."""

    def __init__(self, config: ModernBertConfig, max_model_len: int, placement: Placement) -> None:
        placement = placement.narrowed()
        body = placement.within("model")
        size, eps, bias = config.hidden_size, config.norm_eps, config.norm_bias
        tables = {
            is_local: rotary_table(theta, config.head_dim, max_model_len, placement.device)
            for is_local, theta in ((False, config.global_rope_theta), (True, config.local_rope_theta))
        }
        self.config: ModernBertConfig = config
        self.embed = Embedding("embeddings.tok_embeddings", config.vocab_size, size, body)
        self.embed_norm = LayerNorm("embeddings.norm", size, eps, body, bias=bias)
        self.layers = [
            ModernBertLayer(config, index, tables[is_local], body.within(f"layers.{index}"))
            for index, is_local in enumerate(config.is_local)
        ]
        self.norm = LayerNorm("final_norm", size, eps, body, bias=bias)
        self.classifier = ModernBertClassifier(config, placement) if config.num_labels else None

    def leaves(self) -> Iterator[Leaf]:
        yield from (self.embed, self.embed_norm)
        for layer in self.layers:
            yield from layer.leaves()
        yield self.norm
        if self.classifier is not None:
            yield from self.classifier.leaves()

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        hidden = self.embed_norm(self.embed(input_ids))
        residual = hidden.clone()
        for layer in self.layers:
            hidden = layer(hidden, residual, context)
        return self.norm.add(hidden, residual)

    def ignored(self, name: str) -> bool:
        """The head and decoder of a masked language model."""
        return name.startswith(("head.", "decoder.", "classifier."))


def modernbert_config(raw: Mapping[str, Any], dtype: torch.dtype) -> ModernBertConfig:
    num_layers = required(raw, "num_hidden_layers")
    for layer_type in raw.get("rope_parameters") or {}:
        rope_type = layer_parameters(raw, layer_type).get("rope_type", "default")
        if rope_type != "default":
            raise ModelLoadError(f"config key rope_parameters.{layer_type}: rope_type {rope_type!r}: not supported")
    if raw.get("classifier_pooling", "cls") not in ("cls", "mean"):
        raise ModelLoadError(
            f"config key classifier_pooling: {raw['classifier_pooling']!r} is neither 'cls' nor 'mean'"
        )

    def theta(layer_type: str, key: str, default: float) -> float:
        return positive_number(layer_parameters(raw, layer_type), "rope_theta", raw.get(key, default))

    return ModernBertConfig(
        **encoder_keys(raw, dtype),
        max_position_embeddings=required(raw, "max_position_embeddings"),
        norm_eps=raw.get("norm_eps", 1e-5),
        hidden_act=raw.get("hidden_activation", "gelu"),
        is_local=_local_layers(raw, num_layers),
        window=raw.get("local_attention", 128) // 2,
        global_rope_theta=theta("full_attention", "global_rope_theta", 160_000.0),
        local_rope_theta=theta("sliding_attention", "local_rope_theta", 10_000.0),
        norm_bias=raw.get("norm_bias", False),
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        classifier_bias=raw.get("classifier_bias", False),
        classifier_act=raw.get("classifier_activation", "gelu"),
        classifier_pooling=raw.get("classifier_pooling", "cls"),
    )


def _local_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Returns the local layers by `layer_types`, or all but the first, fourth, ... (`global_attn_every_n_layers`)."""
    types = raw.get("layer_types")
    if types is None:
        every = raw.get("global_attn_every_n_layers") or 3
        return tuple(layer_idx % every != 0 for layer_idx in range(num_layers))
    if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
        raise ModelLoadError(
            f"config key layer_types: expected {num_layers} times full_attention or sliding_attention, found {types}"
        )
    return tuple(layer_type == "sliding_attention" for layer_type in types)


ARCHITECTURES = tuple(
    Architecture(f"ModernBert{task}", "modernbert", modernbert_config, ModernBertModel)
    for task in ("Model", "ForMaskedLM", "ForSequenceClassification")
)

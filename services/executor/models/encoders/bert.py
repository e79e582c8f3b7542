"""BERT: learned positions, token types, and a norm behind every half of a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelLoadError, required
from pagewire.services.executor.layers.attention.encoder_attention import EncoderAttention
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.norm import LayerNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.pooling import Spans
from pagewire.services.executor.models.architecture import Architecture, GgufForm
from pagewire.services.executor.models.encoders.encoder import (
    ACTIVATIONS,
    EncoderConfig,
    EncoderModel,
    encoder_keys,
    token_types,
)
from pagewire.services.executor.models.protocol import Leaf
from pagewire.services.executor.step.step_context import StepContext


@dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig):
    """BERT's config, and with other names and positions RoBERTa's."""

    type_vocab_size: int
    prefix: str = "bert"  # of the encoder in a checkpoint that has a head
    head: tuple[str, str] = ("bert.pooler.dense", "classifier")  # names of the head's two layers
    first_position: int = 0  # row of the position table that the first token takes


class BertLayer:
    """Attention and feed-forward; each half's output is added to its input and normalised."""

    def __init__(self, config: BertConfig, placement: Placement) -> None:
        size, eps = config.hidden_size, config.norm_eps
        attention = placement.within("attention")
        self.qkv = Linear(size, dict.fromkeys(("self.query", "self.key", "self.value"), size), attention, bias=True)
        self.attention = EncoderAttention(config.num_heads, config.head_dim)
        self.attention_output = Linear(size, {"output.dense": size}, attention, bias=True)
        self.attention_norm = LayerNorm("output.LayerNorm", size, eps, attention, bias=True)
        self.intermediate = Linear(size, {"intermediate.dense": config.intermediate_size}, placement, bias=True)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.output = Linear(config.intermediate_size, {"output.dense": size}, placement, bias=True)
        self.output_norm = LayerNorm("output.LayerNorm", size, eps, placement, bias=True)

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [num_tokens, hidden_size], overwritten; same shape out"""
        attended = self.attention(self.attention.heads(self.qkv(hidden)), context)
        hidden = self.attention_norm.add(self.attention_output(attended), hidden)
        return self.output_norm.add(self.output(self.activation(self.intermediate(hidden), None)), hidden)

    def leaves(self) -> Iterator[Leaf]:
        yield from (self.qkv, self.attention_output, self.attention_norm)
        yield from (self.intermediate, self.output, self.output_norm)


class BertEmbeddings:
    def __init__(self, config: BertConfig, placement: Placement) -> None:
        size = config.hidden_size
        num_positions = config.first_position + config.max_position_embeddings
        self.words = Embedding("word_embeddings", config.vocab_size, size, placement)
        self.positions = Embedding("position_embeddings", num_positions, size, placement)
        self.types = Embedding("token_type_embeddings", config.type_vocab_size, size, placement)
        self.norm = LayerNorm("LayerNorm", size, config.norm_eps, placement, bias=True)
        self.first_position = config.first_position
        self.has_types = config.type_vocab_size > 1

    def __call__(self, input_ids: Tensor, context: StepContext) -> Tensor:
        types = token_types(context) if self.has_types else torch.zeros_like(input_ids)
        hidden = self.words(input_ids) + self.types(types)
        return self.norm(hidden + self.positions(context.positions + self.first_position))

    def leaves(self) -> Iterator[Leaf]:
        yield from (self.words, self.positions, self.types, self.norm)


class BertClassifier:
    """A layer with tanh, then the scores, both for the first token."""

    def __init__(self, config: BertConfig, placement: Placement) -> None:
        dense, out = config.head
        self.dense = Linear(config.hidden_size, {dense: config.hidden_size}, placement, bias=True)
        self.out = Linear(config.hidden_size, {out: config.num_labels}, placement, bias=True)
        self.num_labels = config.num_labels

    def classify(self, hidden: Tensor, spans: Spans) -> Tensor:
        return self.out(self.dense(hidden.index_select(0, spans.first)).tanh())

    def leaves(self) -> Iterator[Leaf]:
        yield from (self.dense, self.out)


class BertModel(EncoderModel):
    """The encoder, with a classification head if the config has labels."""

    def __init__(self, config: BertConfig, max_model_len: int, placement: Placement) -> None:
        placement = placement.narrowed()
        body = placement.within(config.prefix)
        self.config: BertConfig = config
        self.embeddings = BertEmbeddings(config, body.within("embeddings"))
        self.layers = [BertLayer(config, body.within(f"encoder.layer.{index}")) for index in range(config.num_layers)]
        self.classifier = BertClassifier(config, placement) if config.num_labels else None

    def leaves(self) -> Iterator[Leaf]:
        yield from self.embeddings.leaves()
        for layer in self.layers:
            yield from layer.leaves()
        if self.classifier is not None:
            yield from self.classifier.leaves()

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        hidden = self.embeddings(input_ids, context)
        for layer in self.layers:
            hidden = layer(hidden, context)
        return hidden

    def ignored(self, name: str) -> bool:
        """Returns whether to ignore a tensor: other heads, and constants."""
        body = f"{self.config.prefix}."
        return not name.startswith(body) or name.startswith(
            (f"{body}pooler.", f"{body}embeddings.position_ids", f"{body}embeddings.token_type_ids")
        )


def bert_keys(raw: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Raises ModelLoadError naming the key for what is not implemented."""
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise ModelLoadError(
            f"config key position_embedding_type: {raw['position_embedding_type']!r} is not supported, only 'absolute'"
        )
    if raw.get("is_decoder"):
        raise ModelLoadError("config key is_decoder: true is not supported; this architecture is served as an encoder")
    return encoder_keys(raw, dtype) | {
        "max_position_embeddings": required(raw, "max_position_embeddings"),
        "norm_eps": raw.get("layer_norm_eps", 1e-12),
        "hidden_act": raw.get("hidden_act", "gelu"),
        "type_vocab_size": required(raw, "type_vocab_size"),
    }


def bert_config(raw: Mapping[str, Any], dtype: torch.dtype) -> BertConfig:
    return BertConfig(**bert_keys(raw, dtype))


def gguf_names(prefix: str) -> dict[str, str]:
    """Returns llama.cpp's names -> those of a checkpoint with a head. prefix: of the encoder."""
    return {
        "token_embd": f"{prefix}.embeddings.word_embeddings",
        "position_embd": f"{prefix}.embeddings.position_embeddings",
        "token_types": f"{prefix}.embeddings.token_type_embeddings",
        "token_embd_norm": f"{prefix}.embeddings.LayerNorm",
        "attn_q": "attention.self.query",
        "attn_k": "attention.self.key",
        "attn_v": "attention.self.value",
        "attn_output": "attention.output.dense",
        "attn_output_norm": "attention.output.LayerNorm",
        "ffn_up": "intermediate.dense",
        "ffn_down": "output.dense",
        "layer_output_norm": "output.LayerNorm",
    }


GGUF_NUMBERS = {"attention.layer_norm_epsilon": "layer_norm_eps"}


def gguf_token_types(stated: Mapping[str, Any]) -> dict[str, Any]:
    if (types := stated.get("token_types.weight")) is None:
        raise ModelLoadError("tensor token_types.weight is missing; convert the model again")
    return {"type_vocab_size": types[0]}


def has_roberta_head(stated: Mapping[str, Any]) -> bool:
    """Returns whether a GGUF file has both layers of the head."""
    return "cls.weight" in stated and "cls.output.weight" in stated


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    if stated.get("pooling_type") == 4 or any(
        name.startswith("cls.") for name in stated
    ):  # converted without BERT's pooler
        raise ModelLoadError("a classifier without the first layer of its head (tensor cls.weight); use safetensors")
    return gguf_token_types(stated)


# For RoBERTa as well: its converter omits the rows of unused positions.
_GGUF = GgufForm(
    "bert",
    layers="bert.encoder.layer",
    names=gguf_names("bert"),
    numbers=GGUF_NUMBERS,
    when=lambda stated: not has_roberta_head(stated),
    derived_keys=_gguf_keys,
)

# Names of a norm's tensors in checkpoints that were converted from TensorFlow -> current names.
OLD_NORMS = {"LayerNorm.gamma": ("LayerNorm.weight",), "LayerNorm.beta": ("LayerNorm.bias",)}

ARCHITECTURES = (
    Architecture("BertModel", "bert", bert_config, BertModel, _GGUF, base="bert.", aliases=OLD_NORMS),
    *(
        Architecture(name, "bert", bert_config, BertModel, base="bert.", aliases=OLD_NORMS)
        for name in ("BertForMaskedLM", "BertForSequenceClassification")
    ),
)

"""A model that shares no layer code with Llama's: layers of unequal KV need, and some without any."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import ModelConfig
from pagewire.services.executor.layers.attention.paged_attention import PagedAttention
from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.kv_spec import KVSpec
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.state_space import Mamba2Mixer, States, StateSpaceConfig
from pagewire.services.executor.models.architecture import Architecture
from pagewire.services.executor.models.protocol import Leaf, OwnModel
from pagewire.services.executor.step.step_context import StepContext

HIDDEN = 32
WINDOW = 5
HEADS = {"full": (2, 1, 16, 0), "window": (4, 2, 8, WINDOW)}  # kind -> heads, KV heads, head size, window

STATE = StateSpaceConfig(
    num_heads=4,
    head_dim=8,
    state_size=16,
    num_groups=2,
    conv_width=4,
    dt_limit=(0.0, float("inf")),
    norm_eps=1e-5,
    bias=False,
    conv_bias=True,
)


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ModelConfig):
    kinds: tuple[str, ...]  # of each layer: full, window, state, or free of all these


class ToyAttention:
    def __init__(self, kind: str, layer_idx: int, dtype: torch.dtype, placement: Placement) -> None:
        self.heads, kv_heads, self.head_dim, window = HEADS[kind]
        sizes = {"q_proj": self.heads, "k_proj": kv_heads, "v_proj": kv_heads}
        self.sizes = [self.heads, kv_heads, kv_heads]
        shards = {name: size * self.head_dim for name, size in sizes.items()}
        self.qkv = Linear(HIDDEN, shards, placement, bias=True)
        self.o = Linear(self.heads * self.head_dim, {"o_proj": HIDDEN}, placement, bias=False)
        spec = KVSpec(kv_heads, self.head_dim, dtype, window)
        self.attention = PagedAttention(layer_idx, spec, self.head_dim**-0.5)

    def project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """q, k and v, each [num_tokens, heads, head_dim]"""
        return self.qkv(hidden).view(len(hidden), -1, self.head_dim).split(self.sizes, dim=1)

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        q, k, v = self.project(hidden)
        return self.o(self.attention(q, k, v, context).reshape(len(hidden), -1))

    def leaves(self) -> Iterator[Leaf]:
        yield from (self.qkv, self.attention, self.o)


class ToyLayer:
    def __init__(self, kind: str, layer_idx: int, dtype: torch.dtype, placement: Placement) -> None:
        self.norm = RMSNorm("norm", HIDDEN, 1e-5, placement)
        inner = placement.within("self_attn")
        self.attention = ToyAttention(kind, layer_idx, dtype, inner) if kind in HEADS else None
        self.mixer = Mamba2Mixer(layer_idx, STATE, HIDDEN, inner) if kind == "state" else None
        self.mix = Linear(HIDDEN, {"mix": HIDDEN}, placement, bias=False) if kind == "free" else None

    def leaves(self) -> Iterator[Leaf]:
        yield self.norm
        if self.attention is not None:
            yield from self.attention.leaves()
        if self.mixer is not None:
            yield from self.mixer.leaves()
        if self.mix is not None:
            yield self.mix


class ToyModel(OwnModel):
    """Learned positions, pre-norm layers, tied head. `seen`: the contexts it received."""

    def __init__(self, config: ToyConfig, max_model_len: int, placement: Placement) -> None:
        placement = placement.within("model")
        self.config: ToyConfig = config
        self.embed = Embedding("embed_tokens", config.vocab_size, HIDDEN, placement, projects=True)
        self.positions = Embedding("embed_positions", config.max_position_embeddings, HIDDEN, placement)
        self.layers = [
            ToyLayer(kind, index, config.dtype, placement.within(f"layers.{index}"))
            for index, kind in enumerate(config.kinds)
        ]
        self.norm = RMSNorm("norm", HIDDEN, 1e-5, placement)
        self.seen: list[StepContext] = []

    def leaves(self) -> Iterator[Leaf]:
        yield from (self.embed, self.positions)
        for layer in self.layers:
            yield from layer.leaves()
        yield self.norm

    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        self.seen.append(context)
        hidden = self.embed(input_ids) + self.positions(context.positions)
        residual = torch.zeros_like(hidden)
        for layer in self.layers:
            hidden = layer.norm.add(hidden, residual)
            if layer.attention is not None:
                hidden = layer.attention(hidden, context)
            if layer.mixer is not None:
                hidden = layer.mixer(hidden, context)
            if layer.mix is not None:
                hidden = layer.mix(hidden)
        return self.norm.add(hidden, residual)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.embed.project(hidden)

    @torch.inference_mode()
    def dense_logits(self, token_ids: list[int]) -> Tensor:
        """[num_tokens, vocab_size] of one sequence, without a cache: what the paged model must give."""
        length = torch.arange(len(token_ids))
        hidden = self.embed(torch.tensor(token_ids)) + self.positions(length)
        residual = torch.zeros_like(hidden)
        distance = length[:, None] - length
        for layer in self.layers:
            hidden = layer.norm.add(hidden, residual)
            if layer.mix is not None:
                hidden = layer.mix(hidden)
            if layer.mixer is not None:
                hidden = without_cache(layer.mixer, hidden)
            if (attention := layer.attention) is not None:
                window = attention.attention.kv_spec().window or len(token_ids)
                q, k, v = (part.transpose(0, 1) for part in attention.project(hidden))
                mask = (distance >= 0) & (distance < window)
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
                hidden = attention.o(out.transpose(0, 1).reshape(len(token_ids), -1))
        return self.compute_logits(self.norm.add(hidden, residual))


def without_cache(mixer: Mamba2Mixer, hidden: Tensor) -> Tensor:
    """Runs the mixer over one sequence, with a state of its own."""
    num_tokens, kept = len(hidden), mixer.state_space.states
    fresh = mixer.state_space.states = States(0, STATE)
    fresh.bind(torch.full((1, STATE.spec.size), torch.nan), 0, num_tokens)
    ints = torch.tensor([[0, num_tokens]], dtype=torch.int32)
    context = StepContext(ints[0], ints[0], ints[0], ints[0, 1:], (ints,), (ints[0],), num_tokens)
    output = mixer(hidden, context)
    mixer.state_space.states = kept
    return output


def toy_config(raw: Mapping[str, Any], dtype: torch.dtype) -> ToyConfig:
    return ToyConfig(
        architecture="ToyForCausalLM",
        vocab_size=raw["vocab_size"],
        hidden_size=HIDDEN,
        max_position_embeddings=raw["max_position_embeddings"],
        dtype=dtype,
        eos_token_ids=(2,),
        kinds=tuple(raw["kinds"]),
    )


TOY = Architecture("ToyForCausalLM", "toy", toy_config, ToyModel)


def write_toy(directory: Path, kinds: Sequence[str], **keys: Any) -> Path:
    config = {
        "architectures": ["ToyForCausalLM"],
        "vocab_size": 200,
        "max_position_embeddings": 96,
        "kinds": list(kinds),
        **keys,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory

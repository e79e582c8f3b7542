"""DeepSeek-V2: latent attention, and routed and shared experts from some layer on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.services.executor.config.model_config import (
    DecoderConfig,
    ModelLoadError,
    decoder_config,
    optional,
    required,
)
from pagewire.services.executor.config.rope_config import RopeConfig
from pagewire.services.executor.layers.attention.latent_attention import LatentAttention, LatentConfig
from pagewire.services.executor.layers.experts.experts import ExpertsConfig, RoutedMLP
from pagewire.services.executor.layers.experts.routing import Routing
from pagewire.services.executor.layers.mlp import GatedMLP
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.layers.sums import JointSum
from pagewire.services.executor.models.architecture import DECODER_NAMES, EXPERTS_NAMES, Architecture, GgufForm
from pagewire.services.executor.models.decoder import Attention, DecoderLayer, DecoderModel, FeedForward
from pagewire.services.executor.models.protocol import Leaf


@dataclass(frozen=True, kw_only=True)
class SparseConfig(DecoderConfig):
    """The config of a decoder with routed and shared experts."""

    experts: ExpertsConfig
    shared_size: int  # intermediate_size of the shared experts together; 0: there are none
    first_sparse_layer: int  # the first one with experts


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(SparseConfig):
    """`head_dim` is the size of the rotary part."""

    latent: LatentConfig


def deepseek_v2_config(raw: Mapping[str, Any], dtype: torch.dtype) -> DeepseekConfig:
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelLoadError(f"config key topk_method: {method!r} is not one of greedy, group_limited_greedy")
    if raw.get("norm_topk_prob"):
        raise ModelLoadError("config key norm_topk_prob: true is not supported for DeepSeek-V2")
    grouped = method == "group_limited_greedy"
    routing = Routing(
        top_k=required(raw, "num_experts_per_tok"),
        in_fp32=True,
        scale=raw.get("routed_scaling_factor", 1.0),
        num_groups=required(raw, "n_group") if grouped else 1,
        topk_groups=required(raw, "topk_group") if grouped else 1,
    )
    return deepseek_config(raw, dtype, routing, first_sparse_layer=raw.get("first_k_dense_replace", 0))


def deepseek_config(
    raw: Mapping[str, Any], dtype: torch.dtype, routing: Routing, *, first_sparse_layer: int
) -> DeepseekConfig:
    """Returns the config that all versions share, with their routing."""
    if raw.get("moe_layer_freq", 1) != 1:
        raise ModelLoadError(f"config key moe_layer_freq: {raw['moe_layer_freq']!r} is not supported, only 1 is")
    rotary_dim = required(raw, "qk_rope_head_dim")
    decoder = decoder_config(
        {**raw, "num_key_value_heads": None}, dtype, head_dim=rotary_dim, mlp_bias=raw.get("mlp_bias", False)
    )
    key_dim, rank = required(raw, "qk_nope_head_dim"), raw.get("q_lora_rank")
    latent = LatentConfig(
        num_heads=decoder.num_heads,
        latent_dim=required(raw, "kv_lora_rank"),
        rotary_dim=rotary_dim,
        key_dim=key_dim,
        value_dim=required(raw, "v_head_dim"),
        query_rank=None if rank is None else required(raw, "q_lora_rank"),
        scale=(key_dim + rotary_dim) ** -0.5 * _temperature(decoder.rope) ** 2,
        interleaved=raw.get("rope_interleave", True) is not False,
        bias=raw.get("attention_bias", False),
        split=raw.get("kv_b_proj_is_split", False),
    )
    sparse = sparse_values(raw, decoder, routing, first_sparse_layer=first_sparse_layer)
    return DeepseekConfig(**vars(decoder), latent=latent, **sparse)


def sparse_values(
    raw: Mapping[str, Any], decoder: DecoderConfig, routing: Routing, *, first_sparse_layer: int
) -> dict[str, Any]:
    """The fields that a SparseConfig adds to a decoder's."""
    expert_size = required(raw, "moe_intermediate_size")
    experts = ExpertsConfig(
        num_experts=required(raw, "n_routed_experts"),
        hidden_size=decoder.hidden_size,
        intermediate_size=expert_size,
        routing=routing,
        activation=decoder.hidden_act,
    )
    shared_size = expert_size * optional(raw, "n_shared_experts", 0)
    return {"experts": experts, "shared_size": shared_size, "first_sparse_layer": first_sparse_layer}


def _temperature(rope: RopeConfig) -> float:
    """Returns YaRN's `mscale`, a factor of queries and of keys, so scores have its square."""
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0


class DeepseekMLP:
    """`routed(x) + shared(x)`"""

    __slots__ = ("routed", "shared", "sum")

    def __init__(self, config: SparseConfig, placement: Placement) -> None:
        self.routed = RoutedMLP(config.experts, placement)
        shared = replace(config, intermediate_size=config.shared_size)
        self.shared = GatedMLP(shared, placement.within("shared_experts")) if config.shared_size else None
        self.sum = None if self.shared is None else JointSum(self.routed, self.shared.down)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        routed = self.routed(hidden)
        return routed if self.shared is None or self.sum is None else self.sum(routed + self.shared(hidden))

    def leaves(self) -> Iterator[Leaf]:
        yield from self.routed.leaves()
        if self.shared is not None:
            yield from self.shared.leaves()


class SparseLayer(DecoderLayer):
    def feed_forward(self, config: DecoderConfig, layer_idx: int, placement: Placement) -> FeedForward:
        assert isinstance(config, SparseConfig)
        if layer_idx < config.first_sparse_layer:
            return super().feed_forward(config, layer_idx, placement)
        return DeepseekMLP(config, placement.within("mlp"))


class DeepseekLayer(SparseLayer):
    def self_attention(
        self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding | None, placement: Placement
    ) -> Attention:
        assert isinstance(config, DeepseekConfig) and rotary is not None
        return LatentAttention(config.latent, config.hidden_size, layer_idx, rotary, placement)


class DeepseekModel(DecoderModel):
    layer = DeepseekLayer


EXAMPLE = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 384,
    "num_key_value_heads": 16,
}

_SIGMOID = 2  # expert_gating_func
# Experts -> n_group and topk_group of DeepSeek-V2 and V3, for old files without these keys.
_GROUPS = {160: (8, 3), 256: (8, 4)}


def gguf_form(*, sigmoid: bool, derived_keys: Callable[[Mapping[str, Any]], dict[str, Any]]) -> GgufForm:
    """Returns the GgufForm of a version; llama.cpp calls all versions deepseek2. derived_keys: the keys of config.json
    that a version adds."""

    def all_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(keys) | _gguf_keys(keys, stated)
        return found | derived_keys(found)

    return GgufForm(
        "deepseek2",
        names={
            **DECODER_NAMES,
            **EXPERTS_NAMES,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
            "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        },
        sizes={
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.value_length": "value_length",
            "expert_count": "n_routed_experts",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        counts={"leading_dense_block_count": "first_k_dense_replace", "expert_shared_count": "n_shared_experts"},
        numbers={
            "attention.key_length_mla": "key_length_mla",
            "attention.q_lora_rank": "q_lora_rank",
            "attention.value_length_mla": "value_length_mla",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
            "rope.scaling.yarn_log_multiplier": "yarn_log_multiplier",
        },
        flags={"expert_weights_norm": "norm_topk_prob"},
        when=lambda stated: (stated.get("expert_gating_func") == _SIGMOID) == sigmoid,
        derived_keys=all_keys,
    )


def _gguf_keys(keys: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths without `mla` are of heads in files with `kv_b_proj`, and of latent vectors in files that split it."""
    n_group, topk_group = _GROUPS.get(keys["n_routed_experts"], (1, 1))
    rope = keys["rope_parameters"] | {"partial_rotary_factor": 1.0}
    if "yarn_log_multiplier" in keys:  # 0.1 * mscale_all_dim, which mscale equals in all models
        rope["mscale"] = rope["mscale_all_dim"] = keys["yarn_log_multiplier"] / 0.1
    return {
        "rope_parameters": rope,
        "qk_nope_head_dim": keys.get("key_length_mla", keys["head_dim"]) - keys["qk_rope_head_dim"],
        "v_head_dim": keys.get("value_length_mla", keys["value_length"]),
        "kv_b_proj_is_split": "blk.0.attn_kv_b.weight" not in stated,
        "n_shared_experts": keys["n_shared_experts"] or None,
        "n_group": keys.get("n_group", n_group),
        "topk_group": keys.get("topk_group", topk_group),
        "routed_scaling_factor": keys.get("routed_scaling_factor", 1.0),
        "norm_topk_prob": keys.get("norm_topk_prob", False),
    }


def _v2_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"topk_method": "group_limited_greedy" if keys["n_group"] > 1 else "greedy"}


ARCHITECTURES = (
    Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        deepseek_v2_config,
        DeepseekModel,
        gguf_form(sigmoid=False, derived_keys=_v2_keys),
        example=EXAMPLE,
    ),
)

"""The CPU's ops in C++. In torch: those on byte weights, which a CPU never gets (`quantized.pack`), and the normed
products, for which a CPU's layers call two ops.

Importing this module raises BuildError where the C++ kernels cannot be compiled.
"""

from __future__ import annotations

from functools import partial

from pagewire.kernels.cpu import sampling
from pagewire.kernels.cpu.accept_tokens import accept_tokens
from pagewire.kernels.cpu.attention import paged_attention, rotary_store_kv, store_kv
from pagewire.kernels.cpu.collectives import all_gather, all_reduce, all_to_all, broadcast
from pagewire.kernels.cpu.elementwise import (
    add_layer_norm,
    add_rms_norm,
    clamped_swiglu,
    gelu,
    gelu_tanh,
    gelu_tanh_and_mul,
    layer_norm,
    norm_add_rms_norm,
    rms_norm_,
    silu_and_mul,
)
from pagewire.kernels.cpu.encoder import encoder_attention, rotate
from pagewire.kernels.cpu.experts import (
    combine_experts,
    experts_linear,
    grouped_experts_linear,
    packed_experts_linear,
    route_experts,
    sort_by_expert,
)
from pagewire.kernels.cpu.fallback import (
    fp8_experts_linear,
    fp8_linear,
    int8_linear,
    normed_grouped_linear,
    normed_linear,
)
from pagewire.kernels.cpu.grouped import grouped_embedding, grouped_linear, rough_grouped_linear
from pagewire.kernels.cpu.latent import head_linear, latent_attention, rotary_store_latent
from pagewire.kernels.cpu.linear import linear
from pagewire.kernels.cpu.lookup import look_up_drafts
from pagewire.kernels.cpu.packed_linear import packed_embedding, packed_linear
from pagewire.kernels.cpu.sampling import apply_penalties
from pagewire.kernels.cpu.state_space import causal_conv, gated_rms_norm, state_scan
from pagewire.kernels.cpu.step_inputs import step_inputs
from pagewire.kernels.cpu.suffix import draft_by_suffix
from pagewire.kernels.cpu.token_groups import TokenGroups, sample_tokens
from pagewire.kernels.cpu.token_masks import mask_tokens

__all__ = [
    "accept_tokens",
    "add_layer_norm",
    "add_rms_norm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apply_penalties",
    "broadcast",
    "causal_conv",
    "clamped_swiglu",
    "combine_experts",
    "draft_by_suffix",
    "encoder_attention",
    "experts_linear",
    "fp8_experts_linear",
    "fp8_linear",
    "gated_rms_norm",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_and_mul",
    "grouped_embedding",
    "grouped_experts_linear",
    "grouped_linear",
    "head_linear",
    "int8_linear",
    "latent_attention",
    "layer_norm",
    "linear",
    "look_up_drafts",
    "mask_tokens",
    "norm_add_rms_norm",
    "normed_grouped_linear",
    "normed_linear",
    "packed_embedding",
    "packed_experts_linear",
    "packed_linear",
    "paged_attention",
    "rms_norm_",
    "rotary_store_kv",
    "rotary_store_latent",
    "rotate",
    "rough_grouped_linear",
    "route_experts",
    "sample_tokens",
    "silu_and_mul",
    "sort_by_expert",
    "state_scan",
    "step_inputs",
    "store_kv",
    "token_logprobs",
]

token_logprobs = partial(sampling.token_logprobs, TokenGroups)

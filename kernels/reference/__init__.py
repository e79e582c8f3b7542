"""The specification: every op in plain torch, written to be read, on any device.

`pagewire.kernels.ops` says what the arguments are. All arithmetic is in fp32 and rounded once to the dtype of the
result, except where a comment says otherwise.
"""

from __future__ import annotations

from pagewire.kernels.reference.attention import (
    FP8_MAX,
    paged_attention,
    rotary_embedding,
    rotary_store_kv,
    store_kv,
    visible,
)
from pagewire.kernels.reference.collectives import all_gather, all_reduce, all_to_all, broadcast
from pagewire.kernels.reference.elementwise import (
    add_layer_norm,
    add_rms_norm,
    clamped_swiglu,
    gelu,
    gelu_tanh,
    gelu_tanh_and_mul,
    layer_norm,
    norm_add_rms_norm,
    rms_norm,
    rms_norm_,
    silu_and_mul,
)
from pagewire.kernels.reference.encoder import encoder_attention, near, rotate
from pagewire.kernels.reference.experts import (
    combine_experts,
    experts_linear,
    fp8_experts_linear,
    grouped_experts_linear,
    route_experts,
    sort_by_expert,
)
from pagewire.kernels.reference.inputs import step_inputs
from pagewire.kernels.reference.latent import head_linear, latent_attention, rotary_store_latent
from pagewire.kernels.reference.products import (
    fp8_linear,
    grouped_embedding,
    grouped_linear,
    int8_linear,
    linear,
    normed_linear,
)
from pagewire.kernels.reference.sampling import (
    accept_tokens,
    apply_penalties,
    look_up_drafts,
    mask_tokens,
    sample_tokens,
    token_logprobs,
)
from pagewire.kernels.reference.state_space import causal_conv, gated_rms_norm, state_scan, tokens_by_block
from pagewire.kernels.reference.suffix import draft_by_suffix

__all__ = [
    "FP8_MAX",
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
    "near",
    "norm_add_rms_norm",
    "normed_linear",
    "paged_attention",
    "rms_norm",
    "rms_norm_",
    "rotary_embedding",
    "rotary_store_kv",
    "rotary_store_latent",
    "rotate",
    "route_experts",
    "sample_tokens",
    "silu_and_mul",
    "sort_by_expert",
    "state_scan",
    "step_inputs",
    "store_kv",
    "token_logprobs",
    "tokens_by_block",
    "visible",
]

"""The operations of Pagewire's models, each defined once in this folder (`definition.op` says how).

A definition states arguments, shapes and meaning. What it means exactly is computed by the function of the same name
in `pagewire.kernels.reference`, in plain torch; `kernels/triton` has it for CUDA, `kernels/cpu` for CPUs: C++ where a
compiler is at hand, plain torch otherwise. Implementations load on first use: a CUDA process never compiles C++, a CPU
process never imports Triton.

Callers import this package and call `ops.<op>`; its arguments are flat because torch's dispatcher has no structures.
"""

# The folder above this one has no __init__.py, on purpose. In a plain checkout, whose root is on sys.path, it is also
# found as `kernels`, the name of a package of Hugging Face that transformers imports if it is installed. A folder
# without an __init__.py gives way to a package wherever on the path that is; one with it would hide the package.

from __future__ import annotations

from pagewire.kernels.ops.attention import MAX_HEAD_DIM, SHORT_QUERY, paged_attention, rotary_store_kv, store_kv
from pagewire.kernels.ops.collectives import all_gather, all_reduce, all_to_all, broadcast
from pagewire.kernels.ops.definition import DEFINITIONS, Definition
from pagewire.kernels.ops.elementwise import (
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
from pagewire.kernels.ops.encoder import encoder_attention, rotate
from pagewire.kernels.ops.experts import (
    combine_experts,
    experts_linear,
    fp8_experts_linear,
    grouped_experts_linear,
    packed_experts_linear,
    route_experts,
    sort_by_expert,
)
from pagewire.kernels.ops.inputs import step_inputs
from pagewire.kernels.ops.latent import MAX_LATENT_DIM, head_linear, latent_attention, rotary_store_latent
from pagewire.kernels.ops.plans import plan_attention, plan_latent_attention
from pagewire.kernels.ops.products import (
    fp8_linear,
    grouped_embedding,
    grouped_linear,
    int8_linear,
    linear,
    normed_grouped_linear,
    normed_linear,
    packed_embedding,
    packed_linear,
    rough_grouped_linear,
)
from pagewire.kernels.ops.sampling import (
    MAX_DRAFTS,
    NOT_A_NUMBER,
    accept_tokens,
    apply_penalties,
    look_up_drafts,
    mask_tokens,
    sample_tokens,
    token_logprobs,
)
from pagewire.kernels.ops.state_space import (
    MAX_CONV_WIDTH,
    MAX_STATE_HEAD_DIM,
    MAX_STATE_SIZE,
    causal_conv,
    gated_rms_norm,
    state_scan,
)
from pagewire.kernels.ops.suffix import draft_by_suffix

__all__ = [
    "DEFINITIONS",
    "MAX_CONV_WIDTH",
    "MAX_DRAFTS",
    "MAX_HEAD_DIM",
    "MAX_LATENT_DIM",
    "MAX_STATE_HEAD_DIM",
    "MAX_STATE_SIZE",
    "NOT_A_NUMBER",
    "SHORT_QUERY",
    "Definition",
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
    "cpu_backend",
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
    "plan_attention",
    "plan_latent_attention",
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


def cpu_backend() -> str:
    """What runs the CPU ops: "cpp", "torch" where no C++ compiler works (slower; logged once), or, if asked for,
    "triton": the CUDA kernels in Triton's interpreter."""
    from pagewire.kernels import cpu

    return cpu.backend()

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
from pagewire.kernels.reference.elementwise import add_rms_norm, gelu_tanh_and_mul, rms_norm, silu_and_mul
from pagewire.kernels.reference.inputs import step_inputs
from pagewire.kernels.reference.products import fp8_linear, grouped_embedding, grouped_linear, int8_linear, linear
from pagewire.kernels.reference.sampling import accept_tokens, apply_penalties, sample_tokens, token_logprobs

__all__ = [
    "FP8_MAX",
    "accept_tokens",
    "add_rms_norm",
    "apply_penalties",
    "fp8_linear",
    "gelu_tanh_and_mul",
    "grouped_embedding",
    "grouped_linear",
    "int8_linear",
    "linear",
    "paged_attention",
    "rms_norm",
    "rotary_embedding",
    "rotary_store_kv",
    "sample_tokens",
    "silu_and_mul",
    "step_inputs",
    "store_kv",
    "token_logprobs",
    "visible",
]

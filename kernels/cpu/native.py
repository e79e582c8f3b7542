"""The CPU's ops in C++, and the two on byte weights that a CPU never gets (`quantized.pack`) in torch.

Importing this module raises BuildError where the C++ kernels cannot be compiled.
"""

from __future__ import annotations

from functools import partial

from pagewire.kernels.cpu import sampling
from pagewire.kernels.cpu.accept_tokens import accept_tokens
from pagewire.kernels.cpu.attention import paged_attention, rotary_store_kv, store_kv
from pagewire.kernels.cpu.elementwise import add_rms_norm, gelu_tanh_and_mul, silu_and_mul
from pagewire.kernels.cpu.fallback import fp8_linear, int8_linear
from pagewire.kernels.cpu.grouped import grouped_embedding, grouped_linear
from pagewire.kernels.cpu.linear import linear
from pagewire.kernels.cpu.packed_linear import packed_embedding, packed_linear
from pagewire.kernels.cpu.sampling import apply_penalties
from pagewire.kernels.cpu.step_inputs import step_inputs
from pagewire.kernels.cpu.token_groups import TokenGroups, sample_tokens

__all__ = [
    "accept_tokens",
    "add_rms_norm",
    "apply_penalties",
    "fp8_linear",
    "gelu_tanh_and_mul",
    "grouped_embedding",
    "grouped_linear",
    "int8_linear",
    "linear",
    "packed_embedding",
    "packed_linear",
    "paged_attention",
    "rotary_store_kv",
    "sample_tokens",
    "silu_and_mul",
    "step_inputs",
    "store_kv",
    "token_logprobs",
]

token_logprobs = partial(sampling.token_logprobs, TokenGroups)

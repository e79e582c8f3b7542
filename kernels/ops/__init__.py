"""The model operators of Pagewire, registered as `torch.ops.pagewire.<op>`.

Importing this package registers every op with its schema, a CPU implementation (C++ when a compiler is at hand,
plain torch otherwise), a CUDA implementation (Triton) and a fake one for tracing. Implementations load on first
use: a CUDA process never compiles C++, a CPU process never imports Triton.

`pagewire.kernels.reference` holds the plain-torch twin of each op; it is the specification that the tests compare with.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from pagewire.kernels.ops import fake

__all__ = ["cpu_backend"]

# op schema -> module with its CUDA implementation, a function of the op's name; None: for CPUs alone
_OPS: dict[str, str | None] = {
    "paged_attention(Tensor query, Tensor kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens, "
    "int max_query_len, float scale, int sliding_window=0, float soft_cap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? kv_scales=None, int split_size=0) -> Tensor": "attention.paged_attention",
    "store_kv(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping, Tensor? kv_scales=None) -> ()": (
        "attention.kv_cache"
    ),
    "rotary_store_kv(Tensor positions, Tensor(a!) qkv, Tensor cos_sin_cache, Tensor(b!) kv_cache, "
    "Tensor slot_mapping, Tensor? q_weight, Tensor? k_weight, float eps, Tensor? kv_scales) -> ()": "attention.rotary",
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor": "elementwise.norm",
    "silu_and_mul(Tensor x) -> Tensor": "elementwise.activation",
    "gelu_tanh_and_mul(Tensor x) -> Tensor": "elementwise.activation",
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor": "products.linear",
    # Quantized weights: codes, scales, offsets, codebook and permutation are a PackedGrouped's.
    "grouped_linear(Tensor x, Tensor codes, Tensor scales, Tensor? offsets, Tensor? codebook, Tensor? permutation, "
    "Tensor? bias, int out_features, int bits, int group_size, int zero_point) -> Tensor": "products.grouped_linear",
    "grouped_embedding(Tensor token_ids, Tensor codes, Tensor scales, Tensor? offsets, Tensor? codebook, "
    "int num_rows, int row_size, int bits, int group_size, int zero_point, ScalarType dtype) -> Tensor": (
        "products.grouped_linear"
    ),
    "int8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? input_scale, Tensor? bias) -> Tensor": (
        "products.int8_linear"
    ),
    "fp8_linear(Tensor x, Tensor weight, Tensor scales, Tensor? input_scale, Tensor? bias) -> Tensor": (
        "products.fp8_linear"
    ),
    # Dense weights in a CPU's layout (`cpu.packed_layout`), where that pays.
    "packed_linear(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor": None,
    "packed_embedding(Tensor token_ids, Tensor weight, int num_rows, int row_size) -> Tensor": None,
    "step_inputs(Tensor rows, Tensor query_start_loc, Tensor num_blocks, Tensor new_block_start_loc, "
    "Tensor new_block_ids, Tensor token_ids, Tensor(a!) num_computed_tokens, Tensor(b!) row_block_table, "
    "Tensor(c!) input_ids, Tensor(d!) positions, Tensor(e!) slot_mapping, Tensor(f!) seq_lens, "
    "Tensor(g!) block_table, int block_size) -> ()": "step_inputs",
    "sample_tokens(Tensor logits, Tensor rows, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
    "Tensor seeds, Tensor(a!) token_ids, Tensor(b!) num_tokens, Tensor? offsets=None) -> Tensor": "sampling.sampling",
    "accept_tokens(Tensor sampled, Tensor rows, Tensor sample_start_loc, Tensor(a!) token_ids, Tensor(b!) num_tokens, "
    "Tensor(c!) num_computed_tokens, Tensor(d!) num_gained) -> ()": "sampling.drafts",
    "apply_penalties(Tensor(a!) logits, Tensor batch_indices, Tensor rows, Tensor token_ids, Tensor num_tokens, "
    "Tensor num_prompt_tokens, Tensor repetition, Tensor presence, Tensor frequency, Tensor? offsets=None) -> ()": (
        "sampling.penalties"
    ),
    "token_logprobs(Tensor logits, Tensor token_ids, int num_top) -> (Tensor, Tensor, Tensor)": "sampling.logprobs",
}

_library = torch.library.Library("pagewire", "DEF")


def _on_first_call(resolve: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A function that finds its implementation when it is first called."""
    implementation: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal implementation
        if implementation is None:
            implementation = resolve()
        return implementation(*args)

    return call


def _cpu(name: str, module: str | None) -> Callable[..., Any]:
    from pagewire.kernels import cpu

    return cpu.implementation(name, module)


def _cuda(name: str, module: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"pagewire.kernels.triton.{module}"), name)


def _register_all() -> None:
    for schema, module in _OPS.items():
        name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, _on_first_call(partial(_cpu, name, module)), "CPU")
        if module is not None:
            _library.impl(name, _on_first_call(partial(_cuda, name, module)), "CUDA")
        torch.library.register_fake(f"pagewire::{name}", getattr(fake, name), lib=_library)


_register_all()


def cpu_backend() -> str:
    """What runs the CPU ops: "cpp", "torch" where no C++ compiler works (slower; logged once), or, if asked for,
    "triton": the CUDA kernels in Triton's interpreter."""
    from pagewire.kernels import cpu

    return cpu.backend()

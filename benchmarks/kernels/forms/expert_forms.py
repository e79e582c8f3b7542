"""Every form in which the kernels of mixtures of experts are compiled for the models that we serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks.kernels.compiler import Specialization
from pagewire.kernels import tuning
from pagewire.kernels.triton.experts import combine, grouped_linear, linear, route, sort

# Experts, experts per token, scoring, normalised, (groups, eligible ones, experts that a group is judged by), and
# whether there is a correction bias: Mixtral 8x7B, Qwen3 30B-A3B, Qwen2 57B-A14B, GPT-OSS 20B, DeepSeek V2 Lite and V3
_ROUTERS = (
    (8, 2, "softmax", True, (1, 1, 1), False),
    (128, 8, "softmax", True, (1, 1, 1), False),
    (64, 8, "softmax", False, (1, 1, 1), False),
    (32, 4, "softmax_of_chosen", False, (1, 1, 1), False),
    (64, 6, "softmax", False, (1, 1, 1), False),
    (256, 8, "sigmoid", True, (8, 4, 2), True),
)
# (experts, inputs of a product) of Qwen3 30B-A3B, Mixtral 8x7B and GPT-OSS 20B
_QWEN, _MIXTRAL, _GPT_OSS = (128, 2048), (8, 4096), (32, 2880)
# Pairs of an expert, on average: a decode step, and what larger tiles are for
_PAIRS = (1, 32, 64, 256)


def expert_forms(capability: int) -> Iterator[Specialization]:
    return (Specialization(*form) for form in _forms(capability))


def _forms(capability: int) -> Iterator[tuple[Any, ...]]:
    for num_experts, top_k, scoring, normalize, groups, bias in _ROUTERS:
        yield route.specialization("bf16", num_experts, top_k, scoring, normalize, groups, correction_bias=bias)
    for num_pairs in (8, 4096):
        yield sort.specialization(num_pairs)
    for top_k in (2, 8):
        yield combine.specialization("bf16", top_k)
    for entry in tuning.load_table("experts", tuning.table_architecture("experts", capability)):
        yield from _listed(entry)
    for pairs, gated in itertools.product(_PAIRS, (False, True)):
        yield _grouped(capability, pairs, _QWEN, 4, 128, "fp16", "zeros", gated)
    few = {"x_bytes": 2, "tokens": 1, "outputs": 4096, "inputs": 4096}
    dense, fp8 = (tuning.lookup("experts", capability, weight_bytes=size, **few) for size in (2, 1))
    yield linear.specialization("bf16", "bf16", *_MIXTRAL, dense)
    yield linear.specialization("bf16", "bf16", *_GPT_OSS, dense, bias=True)
    yield linear.specialization("bf16", "bf16", *_MIXTRAL, fp8, fp8=True)
    for pairs in (1, 256):
        yield _grouped(capability, pairs, _MIXTRAL, 4, 32, "fp32", "minimums")  # Q4_K
        yield _grouped(capability, pairs, _GPT_OSS, 8, 32, "fp32", "mxfp4")


def _listed(entry: tuning.Entry) -> Iterator[tuple[Any, ...]]:
    """Products in a configuration of the table: as stored, or fp8 with scales per output and per block; of down, and of
    gate and up projections."""
    x_bytes, weight_bytes = entry.shape["x_bytes"], entry.shape["weight_bytes"]
    x = {1: "fp8e4nv", 2: "bf16", 4: "fp32"}[x_bytes]
    out = "fp32" if x == "fp32" else "bf16"
    for blocks, gated in itertools.product((False, True) if weight_bytes == 1 else (False,), (False, True)):
        yield linear.specialization(
            x, out, *_QWEN, entry.config, fp8=weight_bytes == 1, block_scales=blocks, gated=gated
        )


def largest_expert_products(capability: int) -> Iterator[Specialization]:
    """Returns of each product the form that needs most registers and shared memory."""
    largest: dict[tuple[int, int], tuple[Any, ...]] = {}
    for entry in tuning.load_table("experts", tuning.table_architecture("experts", capability)):
        *_, largest[entry.shape["x_bytes"], entry.shape["weight_bytes"]] = _listed(entry)
    for form in largest.values():
        yield Specialization(*form)
    for gated in (False, True):
        yield Specialization(*_grouped(capability, 256, _MIXTRAL, 4, 32, "fp32", "minimums", gated))


def _grouped(
    capability: int,
    pairs: int,
    shape: tuple[int, int],
    bits: int,
    group: int,
    scale_type: str,
    form: str,
    gated: bool = False,
) -> tuple[Any, ...]:
    num_experts, num_inputs = shape
    config = tuning.lookup(
        "grouped_gemm", capability, bits=bits, group=group, tokens=pairs, outputs=2048, inputs=num_inputs
    )
    return grouped_linear.specialization(
        "bf16",
        scale_type,
        num_experts,
        bits,
        group,
        num_inputs,
        config,
        zero_point=128 if form == "mxfp4" else 0,
        zeros=form == "zeros",
        minimums=form == "minimums",
        bias=form == "mxfp4",
        gated=gated,
    )

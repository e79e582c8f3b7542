"""Every form in which the kernels of grouped_linear and grouped_embedding are compiled for what we serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.kernels.compiler import Specialization
from pagewire.kernels import tuning
from pagewire.kernels.triton.products import grouped_dequantize, grouped_gemm

# Inputs of a linear layer: a multiple of every tile, and not.
EVEN_INPUTS, RAGGED_INPUTS = 4096, 4304
_SYMMETRIC: dict[str, Any] = {"zero_point": 8}
_ZEROS: dict[str, Any] = {"zeros": True}
_MINIMUMS: dict[str, Any] = {"minimums": True}
# (bits as packed, group size) -> type of scales, form
_WEIGHTS: dict[tuple[int, int], tuple[tuple[str, dict[str, Any]], ...]] = {
    (4, 128): (("fp16", _SYMMETRIC), ("fp16", _ZEROS)),  # GPTQ, AWQ
    (4, 32): (("fp16", _SYMMETRIC), ("fp16", _MINIMUMS), ("fp32", _MINIMUMS)),  # Q4_0, Q4_1, Q4_K
    (4, 16): (("fp32", _SYMMETRIC), ("fp32", _MINIMUMS)),  # Q3_K, Q2_K
    (8, 128): (("fp16", {"zero_point": 128}),),  # GPTQ
    (8, 32): (("fp16", {"zero_point": 128}), ("fp32", _MINIMUMS)),  # Q8_0, Q5_K
    (8, 16): (("fp32", {"zero_point": 32}),),  # Q6_K
}


def grouped_products(capability: int) -> Iterator[Specialization]:
    """The products of AWQ and GPTQ weights in every configuration that their tables can choose, those of other weights
    in the smallest and the largest, and the kernels around them.
    """
    for entry in tuning.load_table("grouped_gemm", tuning.table_architecture("grouped_gemm", capability)):
        if (entry.shape["bits"], entry.shape["group"]) == (4, 128):
            for gated in (False, True):
                yield _gemm("bf16", "fp16", 4, 128, entry.config, gated=gated, **_ZEROS)
    yield from wide_products(capability)
    yield from largest_products(capability)
    for (bits, group), weights in _WEIGHTS.items():
        for scale_type, form in weights:
            yield _gemm("bf16", scale_type, bits, group, _config("grouped_gemm", capability, bits, group, 8), **form)
    config = _config("grouped_gemm", capability, 4, 128, 64)  # with what the others lack
    yield _gemm("fp16", "fp16", 4, 128, config, inputs=RAGGED_INPUTS, bias=True, **_ZEROS)
    yield _gemm("fp16", "fp16", 8, 128, config, **_SYMMETRIC)
    yield _gemm("bf16", "fp32", 4, 128, config, **_ZEROS)
    yield _gemm("bf16", "fp16", 4, EVEN_INPUTS, config, **_ZEROS)
    for kernel in (grouped_dequantize.grouped_dequantize_kernel, grouped_dequantize.grouped_embedding_kernel):
        model = (kernel, "bf16", "fp32")
        for bits, group, option in ((4, 32, "minimums"), (8, 128, "zeros"), (4, 64, "codebook")):
            options: dict[str, Any] = {option: True}
            yield _specialization(grouped_dequantize.specialization(*model, bits, group, **options))
    yield _specialization(grouped_dequantize.gather_specialization("bf16"))


def few_tokens(
    capability: int, tokens: int, *, bits: int = 4, dtype: str = "bf16", zeros: bool = True
) -> Specialization:
    """A product as decode steps of up to `tokens` requests launch it, of an AWQ or GPTQ weight."""
    form = _ZEROS if zeros else _SYMMETRIC
    return _gemm(dtype, "fp16", bits, 128, _config("grouped_gemm", capability, bits, 128, tokens), **form)


def product(config: Mapping[str, int], *, zeros: bool) -> Specialization:
    """Returns the product of an AWQ weight (zeros) or a GPTQ one, as configured."""
    return _gemm("bf16", "fp16", 4, 128, config, described=True, **(_ZEROS if zeros else _SYMMETRIC))


def largest_products(capability: int) -> Iterator[Specialization]:
    """Yields of each format, and each way to multiply, the form that needs most registers."""
    table = tuning.load_table("grouped_gemm", tuning.table_architecture("grouped_gemm", capability))
    for (bits, group), (*_, (scale_type, form)) in _WEIGHTS.items():
        configs = [entry.config for entry in table if (entry.shape["bits"], entry.shape["group"]) == (bits, group)]
        for wide in sorted({config["wide"] for config in configs}):
            largest = max(
                (config for config in configs if config["wide"] == wide),
                key=lambda config: config["block_m"] * config["block_n"] / config["num_warps"],
            )
            yield _gemm("bf16", scale_type, bits, group, largest, described=capability == 90, **form)


def wide_products(capability: int) -> Iterator[Specialization]:
    """The products of AWQ and GPTQ weights with many rows, in every configuration of the table, gated or not."""
    table = tuning.load_table("grouped_gemm", tuning.table_architecture("grouped_gemm", capability))
    configs = {
        tuple(entry.config.values()): entry.config
        for entry in table
        if entry.config["wide"] and (entry.shape["bits"], entry.shape["group"]) == (4, 128)
    }
    for config, form, gated in itertools.product(configs.values(), (_ZEROS, _SYMMETRIC), (False, True)):
        yield _gemm("bf16", "fp16", 4, 128, config, gated=gated, described=capability == 90, **form)


def _config(kernel: str, capability: int, bits: int, group: int, tokens: int) -> Mapping[str, int]:
    shape = {"bits": bits, "group": group, "tokens": tokens, "outputs": 8192, "inputs": EVEN_INPUTS}
    return tuning.lookup(kernel, capability, **shape)


def _gemm(
    dtype: str,
    scale_type: str,
    bits: int,
    group: int,
    config: Mapping[str, int],
    inputs: int = EVEN_INPUTS,
    **form: Any,
) -> Specialization:
    return _specialization(grouped_gemm.specialization(dtype, scale_type, bits, group, inputs, config, **form))


def _specialization(form: tuple[Any, ...]) -> Specialization:
    return Specialization(*form)

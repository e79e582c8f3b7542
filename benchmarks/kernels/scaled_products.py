"""Every form in which the kernels of int8_linear and fp8_linear are compiled for what we serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from benchmarks.kernels.compiler import Specialization
from kernels import fp8_weights, quantize_input, scaled_product, tuning

# Inputs of a linear layer: a multiple of every tile, and not.
EVEN_INPUTS, RAGGED_INPUTS = 4096, 4304
# Tiles of up to so many tokens may be so few that the inputs are split.
SPLIT_ROWS = 64
_TYPES = {"fp8_product": ("fp8e4nv", "bf16"), "int8_product": ("i8", "bf16")}
_WEIGHT_ONLY_TYPES = {2: "bf16", 4: "fp32"}


def scaled_products(capability: int) -> Iterator[Specialization]:
    """The products in every configuration that their tables can choose, and what goes before them."""
    for kernel in ("int8_product", "fp8_weight_only", *(["fp8_product"] if capability >= 89 else [])):
        for entry in tuning.load_table(kernel, tuning.table_architecture(kernel, capability)):
            x, out = _TYPES.get(kernel) or 2 * (_WEIGHT_ONLY_TYPES[entry.shape["x_bytes"]],)
            splits = (False, True) if entry.config["block_m"] <= SPLIT_ROWS else (False,)
            for split, blocks in itertools.product(splits, (False,) if kernel == "int8_product" else (False, True)):
                yield Specialization(
                    *scaled_product.specialization(
                        x, out, entry.config, split=split, block_scales=blocks, num_inputs=EVEN_INPUTS
                    )
                )
    for x in ("i8", "fp16"):  # with what the others lack
        config = tuning.lookup("fp8_weight_only", capability, x_bytes=2, tokens=16, outputs=4096, inputs=4096)
        yield Specialization(
            *scaled_product.specialization(x, "fp16", config, bias=True, split=True, num_inputs=RAGGED_INPUTS)
        )
    for blocks in (False, True):
        yield Specialization(*fp8_weights.specialization("bf16", block_scales=blocks))
    yield from _quantizations(capability)


def _quantizations(capability: int) -> Iterator[Specialization]:
    native = capability >= 90
    for size in (EVEN_INPUTS, 14336):  # in one tile, and in several
        for fixed in (False, True):
            yield Specialization(*quantize_input.tokens_specialization("bf16", size, fp8=False, fixed_scale=fixed))
        if capability >= 89:
            yield Specialization(*quantize_input.tokens_specialization("bf16", size, fp8=True, native_fp8=native))
    if capability >= 89:
        yield Specialization(*quantize_input.groups_specialization("bf16", EVEN_INPUTS, native_fp8=native))

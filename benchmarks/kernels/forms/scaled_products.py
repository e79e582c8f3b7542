"""Every form in which the kernels of int8_linear and fp8_linear are compiled for what we serve."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.compiler import Specialization
from pagewire.kernels import tuning
from pagewire.kernels.triton.products import fp8_weights, quantize_input, scaled_product

# Inputs of a linear layer: a multiple of every tile, and not.
EVEN_INPUTS, RAGGED_INPUTS = 4096, 4304
# Tiles of up to so many tokens may be so few that the inputs are split.
SPLIT_ROWS = 64
SCALED_PRODUCTS = ("int8_product", "fp8_weight_only", "fp8_product")
_TYPES = {"fp8_product": ("fp8e4nv", "bf16"), "int8_product": ("i8", "bf16")}
_WEIGHT_ONLY_TYPES = {2: "bf16", 4: "fp32"}


def scaled_products(capability: int) -> Iterator[Specialization]:
    """The products in every configuration that their tables can choose, and what goes before them.

    Of each the form that needs most: with scales per block, and split where it may be. Without, the smallest tile.
    """
    for kernel in SCALED_PRODUCTS:
        if kernel == "fp8_product" and capability < 89:
            continue
        for entry in tuning.load_table(kernel, tuning.table_architecture(kernel, capability)):
            x, out = _TYPES.get(kernel) or 2 * (_WEIGHT_ONLY_TYPES[entry.shape["x_bytes"]],)
            for gated in (False, True):
                yield Specialization(
                    *scaled_product.specialization(
                        x,
                        out,
                        entry.config,
                        split=entry.config["block_m"] <= SPLIT_ROWS,
                        block_scales=kernel != "int8_product",
                        gated=gated,
                        num_inputs=EVEN_INPUTS,
                    )
                )
        yield few_tokens(kernel, capability)
    for x in ("i8", "fp16"):  # with what the others lack
        config = tuning.lookup("fp8_weight_only", capability, x_bytes=2, tokens=16, outputs=4096, inputs=4096)
        yield Specialization(
            *scaled_product.specialization(x, "fp16", config, bias=True, split=True, num_inputs=RAGGED_INPUTS)
        )
    yield from quantizations(capability)


def few_tokens(kernel: str, capability: int) -> Specialization:
    """A product of bf16, or with a bf16 result, as decode steps of up to 16 requests launch it."""
    shape = {"tokens": 16, "outputs": 4096, "inputs": EVEN_INPUTS}
    x, out = _TYPES.get(kernel, ("bf16", "bf16"))
    bounds = dict.fromkeys(tuning.KERNELS[kernel].bounds, 2)
    config = tuning.lookup(kernel, capability, **shape, **bounds)
    return Specialization(*scaled_product.specialization(x, out, config, split=True, num_inputs=EVEN_INPUTS))


def largest_product(kernel: str, capability: int) -> Specialization:
    """A product of bf16, or with a bf16 result, in the tile that needs most registers."""
    table = tuning.load_table(kernel, tuning.table_architecture(kernel, capability))
    configs = (entry.config for entry in table if entry.shape.get("x_bytes", 2) == 2)
    config = max(configs, key=lambda config: config["block_m"] * config["block_n"])
    x, out = _TYPES.get(kernel, ("bf16", "bf16"))
    return Specialization(
        *scaled_product.specialization(x, out, config, block_scales=kernel != "int8_product", num_inputs=EVEN_INPUTS)
    )


def quantizations(capability: int) -> Iterator[Specialization]:
    """Yields the conversions before products: weights and activations in another type."""
    for blocks in (False, True):
        yield Specialization(*fp8_weights.specialization("bf16", block_scales=blocks))
    native = capability >= 90
    for size in (EVEN_INPUTS, 14336):  # in one tile, and in several
        for fixed in (False, True):
            yield Specialization(*quantize_input.tokens_specialization("bf16", size, fp8=False, fixed_scale=fixed))
        if capability >= 89:
            yield Specialization(*quantize_input.tokens_specialization("bf16", size, fp8=True, native_fp8=native))
    if capability >= 89:
        yield Specialization(*quantize_input.groups_specialization("bf16", EVEN_INPUTS, native_fp8=native))

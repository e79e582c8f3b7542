"""Compiles the Triton kernels for several GPUs, without one. Run by test_compiled.py as

    python -m tests.kernels.compiled.ahead_of_time [--all]

in a process of its own (not the interpreter's). Prints one line per form and architecture; the exit status reports
whether all compiled, fit in shared memory and keep their spills below the bound (`benchmarks.kernels.aot`).

Without --all, what is most likely to break, on sm_90 alone, which has the largest configurations: every configuration
of the attention tables once, in the largest tile that it is chosen for; products with int8, fp8, grouped and experts'
weights in their largest tile; of every other kernel a form; and the machine instructions of products.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Iterator

from benchmarks.kernels.aot import compile_all
from benchmarks.kernels.compiler import ARCHITECTURES, Specialization, _compile, compile_for, instructions
from benchmarks.kernels.forms import grouped_products
from benchmarks.kernels.forms.expert_forms import expert_forms, largest_expert_products
from benchmarks.kernels.forms.scaled_products import (
    SCALED_PRODUCTS,
    SPLIT_ROWS,
    few_tokens,
    largest_product,
    quantizations,
)
from benchmarks.kernels.forms.skinny_forms import skinny_forms
from benchmarks.kernels.forms.specializations import (
    all_forms,
    attention,
    attention_form,
    elementwise,
    encoder_forms,
    sampling_forms,
    state_forms,
)
from benchmarks.kernels.main_loop import count, main_loop
from pagewire.kernels import tuning
from pagewire.kernels.triton.elementwise import activation, norm
from pagewire.kernels.triton.products import grouped_dequantize, scaled_product


def largest_tiles(capability: int) -> Iterator[Specialization]:
    """Returns, of each distinct configuration of the attention kernels, the form with the largest tile."""
    largest: dict[tuple[object, ...], tuple[int, Specialization]] = {}
    for form in attention(capability):
        tile = {name: form.constants[name] for name in ("BLOCK_M", "BLOCK_N", "DIMS", "REST")}
        launch = (form.name, tile["BLOCK_N"], form.num_warps, form.num_stages)
        configuration = (*launch, tile["BLOCK_M"]) if form.name.startswith("prefill") else launch
        element = {"*u8": 1, "*i8": 1, "*bf16": 2, "*fp32": 4}[form.types["kv_cache_ptr"]]
        size = element * tile["BLOCK_M"] * (tile["DIMS"] + tile["REST"])
        if size > largest.get(configuration, (0, form))[0]:
            largest[configuration] = (size, form)
    return (form for _, form in largest.values())


def representatives() -> Iterator[tuple[int, Specialization]]:
    largest = (largest_product(kernel, 90) for kernel in SCALED_PRODUCTS)
    products = (*largest, *grouped_products.largest_products(90), *largest_expert_products(90))
    for form in (*largest_tiles(90), *products):
        yield 90, form
    seen = set()
    others = (
        *sampling_forms(),
        *quantizations(90),
        *expert_forms(90),
        *encoder_forms(),
        *state_forms(),
        *skinny_forms(90),
    )
    for form in (*elementwise(90), *others):
        if form.name not in seen:
            seen.add(form.name)
            yield 90, form


# The capabilities without --all.
QUICK = (90,)


def some_of(forms: list[Specialization], capabilities: Collection[int]) -> list[Specialization]:
    """Returns, without --all, the last form of each kind of arguments, bits and scales, gated and not."""
    if capabilities != QUICK:
        return forms
    constants = ("BITS", "GATED", "BLOCK_SCALES")
    kinds = {(*form.types.items(), *map(form.constants.get, constants)): form for form in forms}
    return list(kinds.values())


# The tensor cores' instruction that each product must come to; a kernel with another one is on a slower path.
PRODUCT_INSTRUCTIONS = {
    ("fp8_product", 89): "QMMA.16832.F32.E4M3.E4M3",
    ("fp8_product", 90): "QGMMA.64x16x32.F32.E4M3.E4M3",
    ("int8_product", 80): "IMMA.16832.S8.S8",
    ("int8_product", 89): "IMMA.16832.S8.S8",
    ("int8_product", 90): "IGMMA.64x16x32.S8.S8",
    # From registers, where weights are converted.
    ("fp8_weight_only", 80): "HMMA.16816.F32.BF16",
    ("fp8_weight_only", 89): "HMMA.16816.F32.BF16",
    ("fp8_weight_only", 90): "HMMA.16816.F32.BF16",
}


def instruction_faults(capabilities: Collection[int]) -> Iterator[str]:
    """Yields slow instructions of products for few tokens."""
    for (kernel, capability), product in PRODUCT_INSTRUCTIONS.items():
        if capability not in capabilities:
            continue
        found = instructions(few_tokens(kernel, capability), capability)
        label = f"{kernel} sm_{capability}"
        if not any(name.startswith(product) for name in found):
            yield f"{label}: no {product} among {sorted(name for name in found if 'MMA' in name)}"
        # Weights become numbers without conversions (I2F.RP is of a division), and without loads of single bytes.
        slow = [name for name in found if name.startswith(("F2F.", "I2F", "LDS.U")) and name != "I2F.RP"]
        if kernel == "fp8_weight_only" and slow:
            yield f"{label}: {slow}"


def loop_faults(capabilities: Collection[int]) -> Iterator[str]:
    """Yields needless work in a step of products with fp8, and with experts' weights."""
    cases: Iterable[tuple[int, int, bool]] = itertools.product((89, 90), (16, 64, 2048), (False, True))
    if capabilities == QUICK:
        cases = ((90, 16, True), (90, 64, False), (90, 2048, True))
    for capability, tokens, blocks in cases:
        config = tuning.lookup("fp8_product", capability, tokens=tokens, outputs=4096, inputs=4096)
        split = config["block_m"] <= SPLIT_ROWS
        product = scaled_product.specialization("fp8e4nv", "bf16", config, block_scales=blocks, split=split)
        # Of a thread's tokens: two rows of a tile on 9.0, more rows on 8.9, or the few columns of a tile of 16.
        most_scales = (5 if tokens == 16 else 9 if capability == 89 else 3) if blocks else 0
        yield from _step_faults(Specialization(*product), capability, most_scales)
    experts = [form for form in expert_forms(90) if form.name == "experts_linear_kernel"]
    for form in some_of(experts, capabilities):
        if form.types["out_ptr"] != "*fp32":
            blocks = form.constants["BLOCK_SCALES"]
            of_weight = blocks + (blocks and form.constants["GATED"])
            yield from _step_faults(form, 90, of_weight + 2 * (blocks and form.types["x_ptr"] == "*fp8e4nv"))


def _step_faults(form: Specialization, capability: int, most_scales: int) -> Iterator[str]:
    loop = main_loop(form, capability)
    label = f"sm_{capability} {form.name} {form.variant}"
    # Operands come by 16 bytes, all but one of the stages ahead: two of them, each a load that is in flight.
    in_flight = f"DEPBAR.LE SB0, {2 * (form.num_stages - 2):#x}"
    copies, waits = count(loop, "LDGSTS."), count(loop, "DEPBAR.LE SB0")
    if copies == 0 or count(loop, "LDGSTS.E.BYPASS.128") != copies or not waits == count(loop, in_flight) > 0:
        found = [text for text in loop if "LDGSTS" in text or "DEPBAR" in text]
        yield f"{label}: loads are small or not in flight, {found}"
    if count(loop, "LDS.U", "F2F.", "I2F"):
        yield f"{label}: weights are converted from single bytes"
    # Products of a step run on while the next one begins; sums of a block leave the tensor cores once per block.
    if (full_waits := count(loop, "WARPGROUP.DEPBAR.LE gsb0, 0x0")) > bool(form.constants["BLOCK_SCALES"]):
        yield f"{label}: {full_waits} waits for all products in each step"
    # Scales of a block: one of the weight, and those of a thread's tokens.
    if (scales := count(loop, "LDG.")) > most_scales:
        yield f"{label}: {scales} loads of scales in each step, {most_scales} are enough"


LONG_PROMPT = {"head_dim": 128, "kv_bytes": 2, "block_size": 16, "group": 4, "batch": 1, "query_len": 4096}


def long_prompt_faults() -> Iterator[str]:
    """Yields what slows down long queries on sm_90."""
    for block_size, copy in ((16, "LDGSTS.E.BYPASS.128"), (64, "UTMALDG")):
        form = attention_form("prefill_attention", 90, LONG_PROMPT | {"block_size": block_size})
        if not count(main_loop(form, 90), copy):
            yield f"prefill_attention sm_90: pages of {block_size} are not copied by {copy}"
        if (programs := compile_for(form, 90).programs_per_sm(ARCHITECTURES[90])) < 2:
            yield f"prefill_attention sm_90: {programs} program a multiprocessor, where two take turns"


# (bits, dtype of x) of products with grouped weights, each with its own way to make numbers of codes
GROUPED_PRODUCTS = ((4, "bf16"), (4, "fp16"), (8, "bf16"))


def grouped_instruction_faults(capabilities: Collection[int]) -> Iterator[str]:
    """Yields fast instructions that products with grouped weights lack, and slow ones that they have."""
    for capability, (bits, dtype) in itertools.product(capabilities, GROUPED_PRODUCTS):
        form = grouped_products.few_tokens(capability, 8, bits=bits, dtype=dtype, zeros=bits == 4)
        found = instructions(form, capability)
        label = f"grouped_gemm of {bits} bits, {dtype} sm_{capability}"
        # Products of 8 columns; weights by 16 bytes to shared memory, and from there as matrices.
        for wanted in ("HMMA.16816.F32", "LDGSTS.E.BYPASS.128", "LDSM.16.M88.4"):
            if not any(name.startswith(wanted) for name in found):
                yield f"{label}: no {wanted} among {sorted(found)}"
        slow = [name for name in found if name.startswith(("F2F.", "I2F", "LDS.U", "STS.U")) and name != "I2F.RP"]
        if slow:
            yield f"{label}: {slow}"


def wide_faults(capabilities: Collection[int]) -> Iterator[str]:
    """Yields what leaves the tensor cores of sm_90 without work in products with grouped weights and many rows."""
    experts = [form for form in expert_forms(90) if form.constants.get("WIDE")]
    products = list(grouped_products.wide_products(90))
    for form in (*some_of(products, capabilities), *some_of(experts, capabilities)):
        loop = main_loop(form, 90)
        found = {
            "waits until all products are done": count(loop, "WARPGROUP.DEPBAR.LE gsb0, 0x0"),
            "stores, beyond one of scales": max(0, count(loop, "STS", "STL") - 1),
            "integers converted": count(loop, "I2F"),
            "barriers, beyond three a tile": max(0, count(loop, "BAR.SYNC") - 3),
            # A product of 16 inputs and 64 outputs for each: of all planes of a tile.
            "products of other sizes": 16
            // form.constants["BITS"]
            * form.constants["WIDTH"]
            // 16
            * (form.constants["BLOCK_N"] // 64 // (form.num_warps // 4))
            - count(loop, f"HGMMA.64x{form.constants['BLOCK_M']}x16"),
        }
        for what, times in found.items():
            if times:
                yield f"{form.variant} sm_90: {what}: {times}"


def eviction_faults() -> Iterator[str]:
    """Yields kernels that lose the hint that the L2 cache need not keep what they load: Triton drops it when it
    pipelines."""
    yielding = (
        norm.specialization("bf16", 4096, many_rows=True),
        activation.specialization("bf16", 14336),
        grouped_dequantize.specialization(
            grouped_dequantize.grouped_dequantize_kernel, "bf16", "fp16", 4, 128, zeros=True
        ),
    )
    for form in (Specialization(*arguments) for arguments in yielding):
        ptx = _compile(form, 90).asm["ptx"]
        if "createpolicy.fractional.L2::evict_first" not in ptx or "L1::evict_first.L2::cache_hint" not in ptx:
            yield f"{form.name} sm_90: no load is evicted first"


def main() -> int:
    if "--all" in sys.argv[1:]:
        capabilities: Collection[int] = ARCHITECTURES
        forms = [(capability, form) for capability in ARCHITECTURES for form in all_forms(capability).values()]
    else:
        capabilities, forms = QUICK, list(representatives())
    _, failed = compile_all(forms)
    failed += [
        *instruction_faults(capabilities),
        *loop_faults(capabilities),
        *long_prompt_faults(),
        *grouped_instruction_faults(capabilities),
        *wide_faults(capabilities),
    ]
    failed += eviction_faults()
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

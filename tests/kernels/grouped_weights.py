"""Random grouped weights in all forms that `pagewire.kernels.quantized.weights.GroupedWeight` has."""

from __future__ import annotations

import torch

from pagewire.kernels.quantized.weights import SUPER_SIZE, GroupedWeight

# As checkpoints have them: GPTQ, AWQ, Q4_1, bf16 checkpoints, K-quants.
FORMS = ("symmetric", "zeros", "minimums", "fp32", "fp32 zeros", "supers", "super minimums")


def grouped_weight(
    num_outputs: int, num_inputs: int, bits: int, group_size: int, form: str, *, permuted: bool = False
) -> GroupedWeight:
    """Scales are such that products with standard normal activations are about 1 large. Scales of scales need groups
    that divide 256: others are "fp32"."""
    group_size = min(group_size, num_inputs)
    shape = (num_outputs, -(-num_inputs // group_size))
    if form.startswith("super") and SUPER_SIZE % group_size != 0:
        form = "fp32"
    size = 2.0 / (2**bits * num_inputs**0.5)
    scales = (0.5 + torch.rand(shape)) * size
    supers = (num_outputs, -(-num_inputs // SUPER_SIZE))
    codes = torch.randint(0, 2**bits, (num_outputs, num_inputs)).to(torch.uint8)
    weight: dict[str, object] = {"scales": scales.half(), "zero_point": 2 ** (bits - 1)}
    if form == "zeros":
        weight = {"scales": scales.half(), "offsets": torch.randint(0, 2**bits, shape).to(torch.uint8)}
    elif form == "minimums":
        weight = {"scales": scales.half(), "offsets": (-scales * 2 ** (bits - 1)).half()}
    elif form == "fp32":
        weight["scales"] = scales
    elif form == "fp32 zeros":
        weight = {"scales": scales, "offsets": torch.randint(0, 2**bits, shape).to(torch.uint8)}
    elif form.startswith("super"):
        weight["scales"] = torch.randint(-127, 128, shape).to(torch.int8)
        weight["super_scales"] = (size / 64 * (0.5 + torch.rand(supers))).half()
        if form == "super minimums":
            weight["zero_point"] = 0
            weight["offsets"] = torch.randint(0, 64, shape).to(torch.uint8)
            weight["super_offsets"] = (-size / 4 * torch.rand(supers)).half()
    permutation = torch.randperm(num_inputs).int() if permuted else None
    return GroupedWeight(codes, bits, group_size, permutation=permutation, **weight)  # type: ignore[arg-type]

"""The op int8_linear on CUDA: products of int8 with int8 (W8A8), exact in int32.

Always the kernel of `scaled_product.py`. torch._int_mm (17 rows or more, sizes in multiples of 8) leaves int32 in
memory, which another kernel would have to read and scale: ten bytes more for each number of the result, as much time as
the product itself takes in 4096 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
from pagewire.kernels import tuning
from pagewire.kernels.triton.products.quantize_input import quantize_tokens
from pagewire.kernels.triton.products.scaled_product import check_operands, scaled_product


def int8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, gated: bool
) -> Tensor:
    """Computes `reference.int8_linear`; x [num_tokens, K] may have any stride between rows.

    A token with a NaN gives NaN, and one with an infinity too unless input_scale says how far numbers go.
    """
    check_operands(x, weight, torch.int8, scales, bias)
    assert scales.shape == (weight.shape[0],), "scales must be [N]"
    if x.shape[0] == 0:
        return x.new_empty((0, weight.shape[0] // 2 if gated else weight.shape[0]))
    codes, x_scales = quantize_tokens(x, input_scale, torch.int8)
    config = tuning.lookup(
        "int8_product", tuning.capability_of(x.device), tokens=triton.next_power_of_2(x.shape[0]),
        outputs=weight.shape[0], inputs=weight.shape[1],
    )  # fmt: skip
    return scaled_product(codes, weight, x_scales, scales, bias, x.dtype, config, gated=gated)

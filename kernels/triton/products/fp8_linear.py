"""The op fp8_linear on CUDA: e4m3 weights with scales per output, or per block of 128 x 128.

Which product is computed depends on the GPU and the number of tokens:

- Compute capability 8.0 to 8.6 multiplies no fp8. Weight-only: the kernel of `scaled_product.py` converts weights
  as it reads them; from the table's library_rows on, all of the weight is converted first and cuBLAS multiplies.
- 8.9 and above: activations are quantized, too, and fp8 is multiplied with fp8. With a scale per output that is
  torch._scaled_mm from library_rows on, with scales per block from block_library_rows on, for what it takes
  (`_refusal`).
- There, too, weight-only for few tokens and weights of some megabytes: reading the weight is all the time that takes,
  and it saves the launch of a kernel that quantizes, some 2 us: as much as converting weights costs us where 30 MB are
  read at 4 TB/s with 0.7 instead of 0.85 of the bandwidth (a model, not a measurement). It is more precise as well.

Compute capability 9.0 adds products of e4m3 with some 14 bits. With a scale per output we let it, in _scaled_mm and in
our kernel (fast accumulation), as vLLM and SGLang do: to add every 128 inputs up in fp32 costs a wait for all products
of each step. With scales per block the sums of 128 inputs have to leave the tensor cores anyway, and fp32 adds them.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

import triton
from pagewire.kernels import tuning
from pagewire.kernels.triton.elementwise.activation import silu_and_mul
from pagewire.kernels.triton.products.fp8_weights import dequantize
from pagewire.kernels.triton.products.quantize_input import GROUP, quantize_groups, quantize_tokens
from pagewire.kernels.triton.products.scaled_product import check_operands, scaled_product

logger = logging.getLogger(__name__)

# On GPUs that multiply fp8: weight-only for up to this many tokens (a tile of the kernel), if the weight is no larger.
WEIGHT_ONLY_ROWS = 16
WEIGHT_ONLY_BYTES = 32 << 20
# Where torch._scaled_mm takes scales per row: cuBLAS on 9.0, CUTLASS on 8.9.
_LIBRARY_CAPABILITIES = (89, 90)
# Its cuBLAS multiplies with scales per block since this version of CUDA.
_BLOCKS_SINCE = (12, 9)


def fp8_linear(
    x: Tensor, weight: Tensor, scales: Tensor, input_scale: Tensor | None, bias: Tensor | None, gated: bool
) -> Tensor:
    """Computes `reference.fp8_linear`, with quantize_input or without; x may have any stride between rows.

    A token (a group of its inputs) with a NaN gives NaN, and one with an infinity too.
    """
    check_operands(x, weight, torch.float8_e4m3fn, scales, bias)
    num_outputs, num_inputs = weight.shape
    blocks = (triton.cdiv(num_outputs, GROUP), triton.cdiv(num_inputs, GROUP))
    assert scales.shape in ((num_outputs,), blocks), "scales must be [N] or [ceil(N / 128), ceil(K / 128)]"
    if x.shape[0] == 0:
        return x.new_empty((0, num_outputs // 2 if gated else num_outputs))
    few = x.shape[0] <= WEIGHT_ONLY_ROWS and weight.numel() <= WEIGHT_ONLY_BYTES
    if few or not multiplies_fp8(x.device):
        return weight_only_linear(x, weight, scales, bias, gated)
    return quantized_linear(x, weight, scales, input_scale, bias, gated)


@cache
def multiplies_fp8(device: torch.device) -> bool:
    return tuning.capability_of(device) >= 89


def weight_only_linear(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, gated: bool = False) -> Tensor:
    """Computes x as it is. Where cuBLAS multiplies, weights are rounded to x's dtype once they are scaled."""
    config = tuning.lookup(
        "fp8_weight_only", tuning.capability_of(x.device), x_bytes=x.dtype.itemsize,
        tokens=triton.next_power_of_2(x.shape[0]), outputs=weight.shape[0], inputs=weight.shape[1],
    )  # fmt: skip
    if x.shape[0] >= config["library_rows"]:
        product = F.linear(x, dequantize(weight, scales, x.dtype), bias)
        return silu_and_mul(product) if gated else product
    return scaled_product(x, weight, None, scales, bias, x.dtype, config, gated=gated)


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    input_scale: Tensor | None,
    bias: Tensor | None,
    gated: bool = False,
) -> Tensor:
    """Computes x quantized to e4m3."""
    config = tuning.lookup(
        "fp8_product", tuning.capability_of(x.device), tokens=triton.next_power_of_2(x.shape[0]),
        outputs=weight.shape[0], inputs=weight.shape[1],
    )  # fmt: skip
    blocks, groups = scales.dim() == 2, scales.dim() == 2 and input_scale is None
    by_library = blocks == groups and x.shape[0] >= config["block_library_rows" if blocks else "library_rows"]
    if by_library and (refusal := _refusal(x.device, x.dtype, *weight.shape, blocks)) is not None:
        _log_refusal(refusal)
        by_library = False
    if by_library and blocks:
        # cuBLAS takes multiples of four tokens.
        missing = -x.shape[0] % 4
        codes, x_scales = quantize_groups(F.pad(x, (0, 0, 0, missing)) if missing else x)
        product = torch._scaled_mm(codes, weight.T, x_scales.T, scales.T, bias, out_dtype=x.dtype)[: x.shape[0]]
        return silu_and_mul(product) if gated else product
    codes, x_scales = quantize_groups(x) if groups else quantize_tokens(x, input_scale, torch.float8_e4m3fn)
    if by_library:
        product = torch._scaled_mm(
            codes, weight.T, x_scales[:, None], scales[None, :], bias, out_dtype=x.dtype, use_fast_accum=True
        )
        return silu_and_mul(product) if gated else product
    return scaled_product(codes, weight, x_scales, scales, bias, x.dtype, config, gated=gated)


@cache
def _refusal(
    device: torch.device, dtype: torch.dtype, num_outputs: int, num_inputs: int, blocks: bool = False
) -> str | None:
    """Returns why torch._scaled_mm with scales per row, or per block, does not take this; None if it does.

    The conditions are those of torch 2.11 to 2.13; fp16 and fp32 results are given by some of its backends only. Some
    of these versions want rows of blocks' scales to begin at multiples of 4.
    """
    if device.type != "cuda":
        return "the interpreter has no torch._scaled_mm"
    if tuning.capability_of(device) not in _LIBRARY_CAPABILITIES:
        return f"torch._scaled_mm is not known to us on compute capability {tuning.capability_of(device) / 10}"
    if dtype is not torch.bfloat16:
        return f"torch._scaled_mm gives bfloat16, not {dtype}"
    if blocks and tuning.capability_of(device) != 90:
        return f"torch._scaled_mm has no blocks on compute capability {tuning.capability_of(device) / 10}"
    if blocks and _cuda_version() < _BLOCKS_SINCE:
        return f"torch._scaled_mm has no blocks with CUDA {torch.version.cuda}, but from 12.9 on"
    if blocks and (num_outputs % GROUP or num_inputs % (4 * GROUP)):
        return f"torch._scaled_mm needs whole blocks, 4 in a row, not a weight of {num_outputs} x {num_inputs}"
    if num_outputs % 16 or num_inputs % 16:
        return f"torch._scaled_mm needs multiples of 16, not a weight of {num_outputs} x {num_inputs}"
    return None


def _cuda_version() -> tuple[int, ...]:
    """That torch was built with."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split("."))


@cache  # once each
def _log_refusal(refusal: str) -> None:
    logger.warning("fp8_linear: %s; using a kernel of our own", refusal)

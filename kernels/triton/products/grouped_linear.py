"""The ops grouped_linear and grouped_embedding on CUDA: selects the kernel by the number of rows.

With few rows, time goes to reading the weights: the kernel takes them as packed, and scales sums. With more rows, time
goes to arithmetic: on sm_90 the kernel scales weights (`grouped_wide.py`). With so many rows that writing a dense
weight is cheap in comparison, the weights are dequantized first, and cuBLAS multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import tuning
from pagewire.kernels.triton.elementwise.activation import silu_and_mul
from pagewire.kernels.triton.products import grouped_dequantize
from pagewire.kernels.triton.products.grouped_gemm import grouped_gemm
from pagewire.kernels.triton.products.grouped_layout import groups_fit


def grouped_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    permutation: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    bits: int,
    group_size: int,
    zero_point: int,
    dtype: torch.dtype | None = None,
    *,
    gated: bool = False,
) -> Tensor:
    """Computes `reference.grouped_linear` of a weight in the layout "cuda"; x [num_tokens, K], any row stride.

    Where weights are scaled or dequantized first, they are rounded to x's dtype, as the sums are where dtype is
    another. gated: `silu_and_mul` of the product, by its kernel unless the rows are few or many enough for another
    kernel.
    """
    num_tokens, num_inputs = x.shape
    dtype = x.dtype if dtype is None else dtype
    if num_tokens == 0:
        return x.new_empty(0, out_features // 2 if gated else out_features, dtype=dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    weight = (codes, scales, offsets)
    form = (out_features, bits, group_size, zero_point)
    shape = {"bits": bits, "group": min(group_size, num_inputs), "tokens": num_tokens}
    shape |= {"outputs": out_features, "inputs": num_inputs}
    capability = tuning.capability_of(x.device)
    fits = codebook is None and groups_fit(bits, group_size, num_inputs)
    in_fp32 = x.is_cuda and x.dtype is torch.float32  # tensor cores have no such thing
    in_kernel = False  # whether the kernel has computed silu_and_mul
    if permutation is not None:
        x = grouped_dequantize.gather_columns(x, permutation)
    gemm = tuning.lookup("grouped_gemm", capability, **shape)
    if fits and not in_fp32 and num_tokens < gemm["library_rows"]:
        in_kernel = gated and out_features % 16 == 0  # gates and ups are loaded by eight rows
        product = grouped_gemm(x, *weight, bias, *form, gemm, gated=in_kernel)
    else:
        dense_shape = (out_features, num_inputs)
        dense = grouped_dequantize.dequantize(*weight, codebook, dense_shape, bits, group_size, zero_point, x.dtype)
        product = F.linear(x, dense, bias)
    return (silu_and_mul(product) if gated and not in_kernel else product).to(dtype)


def grouped_embedding(
    token_ids: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    codebook: Tensor | None,
    num_rows: int,
    row_size: int,
    bits: int,
    group_size: int,
    zero_point: int,
    dtype: torch.dtype,
) -> Tensor:
    """Computes `reference.grouped_embedding` of a weight in the layout "cuda"; token_ids int64, any shape."""
    rows = token_ids.reshape(-1)
    if rows.shape[0] == 0:
        return codes.new_empty((*token_ids.shape, row_size), dtype=dtype)
    out = grouped_dequantize.embed(
        rows, codes, scales, offsets, codebook, row_size, bits, group_size, zero_point, dtype
    )
    return out.view(*token_ids.shape, row_size)

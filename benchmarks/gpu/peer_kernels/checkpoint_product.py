"""The plain way to multiply with AWQ weights in Triton: on the checkpoint's layout, as it lies in the file.

A baseline for ours: what others did before weights were rearranged at load. Every program reads words of eight
outputs, undoes their order with shifts, converts to float, applies zero point and scale, multiplies; the inputs are
split over programs; another launch adds their sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight

NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight outputs of a word
BLOCK_N, BLOCK_K = 64, 64
SPLITS = 4


@triton.jit
def _nibbles(words, BLOCK_N: tl.constexpr):
    """[rows, BLOCK_N / 8] -> [rows, BLOCK_N] codes of the outputs in order"""
    words = tl.interleave(words, words)
    words = tl.interleave(words, words)
    words = tl.interleave(words, words)
    column = tl.arange(0, BLOCK_N) % 8
    return (words >> (((column % 2) * 4 + column // 2) * 4)[None, :]) & 0xF


@triton.jit
def awq_product_kernel(
    x_ptr,  # [num_tokens, K]
    words_ptr,  # int32 [K, N / 8]
    zeros_ptr,  # int32 [K / GROUP, N / 8]
    scales_ptr,  # [K / GROUP, N]
    sums_ptr,  # fp32 [SPLITS, num_tokens, N]
    num_tokens,
    N,
    K,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (tile of tokens, tile of outputs, split of the inputs)."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    words = tl.program_id(1) * (BLOCK_N // 8) + tl.arange(0, BLOCK_N // 8)
    split = tl.program_id(2)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(split * BLOCK_K, K, SPLITS * BLOCK_K):
        inputs = start + tl.arange(0, BLOCK_K)
        group = start // GROUP
        x = tl.load(x_ptr + tokens[:, None] * K + inputs[None, :], mask=tokens[:, None] < num_tokens, other=0.0)
        codes = _nibbles(tl.load(words_ptr + inputs[:, None] * (N // 8) + words[None, :]), BLOCK_N)
        zeros = _nibbles(tl.load(zeros_ptr + group * (N // 8) + words[None, :]), BLOCK_N)
        scales = tl.load(scales_ptr + group * N + outputs)
        weight = (codes - zeros).to(scales.dtype) * scales[None, :]
        total = tl.dot(x, weight.to(x.dtype), total)
    target = sums_ptr + (split * num_tokens + tokens[:, None]).to(tl.int64) * N + outputs[None, :]
    tl.store(target, total, mask=tokens[:, None] < num_tokens)


def awq_layout(weight: GroupedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Returns qweight int32 [K, N / 8], qzeros int32 [G, N / 8] and scales float16 [G, N] of version "gemm"."""
    assert weight.offsets is not None and weight.bits == 4, "the weight must be AWQ's"
    return _words(weight.codes), _words(weight.offsets), weight.scales.t().contiguous()


def _words(codes: Tensor) -> Tensor:
    """uint8 [N, columns] -> int32 [columns, N / 8]"""
    num_outputs, columns = codes.shape
    nibbles = codes.t().reshape(columns, num_outputs // 8, 8).int()
    words = torch.zeros(columns, num_outputs // 8, dtype=torch.int32, device=codes.device)
    for output, nibble in enumerate(NIBBLE_OF_OUTPUT):
        words |= nibbles[:, :, output] << (4 * nibble)
    return words


def awq_product(x: Tensor, words: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Multiplies x [num_tokens, K] by a weight of `awq_layout` with at least 64 inputs per group: [num_tokens, N]."""
    num_tokens, num_inputs = x.shape
    num_outputs, group_size = scales.shape[1], num_inputs // scales.shape[0]
    assert num_outputs % BLOCK_N == 0 and group_size % BLOCK_K == 0, "not a shape of this baseline"
    sums = torch.empty(SPLITS, num_tokens, num_outputs, dtype=torch.float32, device=x.device)
    block_m = min(64, max(16, triton.next_power_of_2(num_tokens)))
    grid = (triton.cdiv(num_tokens, block_m), num_outputs // BLOCK_N, SPLITS)
    awq_product_kernel[grid](
        x, words, zeros, scales, sums, num_tokens, num_outputs, num_inputs,
        GROUP=group_size, SPLITS=SPLITS, BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
    )  # fmt: skip
    return sums.sum(0).to(x.dtype)

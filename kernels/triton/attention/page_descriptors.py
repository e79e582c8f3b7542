"""Tiles of keys within one page each, copied by the tensor memory accelerator (TMA) of sm_90.

One thread asks for a whole tile by a descriptor of the KV cache. `attend` computes an address for each row instead, in
registers and instructions of every thread. Without them 128 rows fit a program of four warps, two programs a
multiprocessor, which take turns: one multiplies while the other one weighs. Neither waits for the other, as the warps
of one program must, and each reads keys for 128 rows, so that the L2 cache can keep up.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.attention.attention_tile import weigh
from triton.tools.tensor_descriptor import TensorDescriptor


def can_describe(head_dim: int, block_size: int, block_n: int, dtype: torch.dtype, latent_dim: int) -> bool:
    """Returns whether a tile of keys is one box of a descriptor, as the tensor cores want it."""
    in_16_bits = dtype in (torch.float16, torch.bfloat16)
    return in_16_bits and latent_dim == 0 and block_size >= block_n and head_dim in (64, 128, 256)


def describe_pages(kv_cache: Tensor, block_n: int) -> TensorDescriptor:
    """Returns [num_blocks, 2 * num_kv_heads * block_size, head_dim], in boxes of block_n tokens of one head.

    kv_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], each block contiguous.
    """
    num_blocks, halves, num_kv_heads, block_size, head_dim = kv_cache.shape
    shape = [num_blocks, halves * num_kv_heads * block_size, head_dim]
    return TensorDescriptor(kv_cache, shape, [kv_cache.stride(0), head_dim, 1], [1, block_n, head_dim])


def descriptor_type(element: str, head_dim: int, block_n: int) -> str:
    """Returns Triton's name of the type of `describe_pages`; element: as "bf16"."""
    return f"tensordesc<{element}[1,{block_n},{head_dim}]>"


@triton.jit
def attend_pages(
    query,  # [BLOCK_M, HEAD_DIM]; arguments of the same names are those of `attend`
    acc,
    maximum,
    denominator,
    pages,  # from `describe_pages`
    table_ptr,  # int32 [pages], the request's block ids
    kv_head,
    num_kv_heads,
    start,
    stop,  # keys start .. stop, a whole number of tiles, which every row sees
    position,
    scale,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Returns acc, maximum and denominator with the keys start .. stop, which may be none."""
    block = load_block(table_ptr, start, stop, BLOCK_SIZE)
    for tile_start in tl.range(start, stop, BLOCK_N):
        following = load_block(table_ptr, tile_start + BLOCK_N, stop, BLOCK_SIZE)
        row = kv_head * BLOCK_SIZE + tile_start % BLOCK_SIZE
        key = pages.load([block, row, 0]).reshape(BLOCK_N, HEAD_DIM)
        value = pages.load([block, row + num_kv_heads * BLOCK_SIZE, 0]).reshape(BLOCK_N, HEAD_DIM)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        keys = tile_start + tl.arange(0, BLOCK_N)
        weights, maximum, correction = weigh(scores, maximum, keys, position, scale, 0, SOFT_CAP, False)
        denominator = denominator * correction + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(query.dtype), value, acc * correction[:, None], input_precision="ieee")
        block = following
    return acc, maximum, denominator


@triton.jit
def load_block(table_ptr, position, stop, BLOCK_SIZE: tl.constexpr):
    """Returns int32: the block id of a token, 0 from `stop` on."""
    return tl.load(table_ptr + position // BLOCK_SIZE, mask=position < stop, other=0)

"""The op mask_tokens on CUDA: each program looks at a tile of one position's tokens, and stores nothing but -inf."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton
import triton.language as tl
from pagewire.kernels.triton.common.launch import dependent_launch, launch_dependents, wait_for_inputs

_WARPS = 4
_TILE = 4096  # tokens of a program


@triton.jit
def mask_tokens_kernel(
    logits_ptr,  # fp32 [S, vocab_size], changed in place
    batch_indices_ptr,  # int32 [n]
    masks_ptr,  # int32 [n, num_words]
    vocab_size,
    num_words,
    logits_stride,
    TILE: tl.constexpr,
):
    """Grid (tiles of the vocabulary, n)."""
    wait_for_inputs()
    launch_dependents()
    index = tl.program_id(1).to(tl.int64)
    logits = logits_ptr + tl.load(batch_indices_ptr + index).to(tl.int64) * logits_stride
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_token = token < vocab_size
    word = tl.load(masks_ptr + index * num_words + token // 32, mask=is_token, other=-1)
    is_masked = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + token, float("-inf"), mask=is_token & is_masked)


def mask_tokens(logits: Tensor, batch_indices: Tensor, masks: Tensor) -> None:
    """Computes `reference.mask_tokens`."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "logits must be fp32 in contiguous rows"
    assert batch_indices.dtype == masks.dtype == torch.int32, "batch_indices and masks must be int32"
    assert batch_indices.is_contiguous() and masks.is_contiguous(), "batch_indices and masks must be contiguous"
    num_masks, vocab_size = len(batch_indices), logits.shape[1]
    assert masks.shape == (num_masks, triton.cdiv(vocab_size, 32)), "masks must have a bit per token, in whole words"
    if num_masks == 0:
        return
    mask_tokens_kernel[(triton.cdiv(vocab_size, _TILE), num_masks)](
        logits,
        batch_indices,
        masks,
        vocab_size,
        masks.shape[1],
        logits.stride(0),
        TILE=_TILE,
        num_warps=_WARPS,
        **dependent_launch(logits.device),
    )


def specialization() -> tuple[Any, dict[str, str], dict[str, Any], int]:
    """Returns (kernel, argument types, constants, num_warps), for ahead-of-time compilation."""
    types = {"logits_ptr": "*fp32", "batch_indices_ptr": "*i32", "masks_ptr": "*i32"}
    types |= {"vocab_size": "i32", "num_words": "i32", "logits_stride": "i32"}
    return mask_tokens_kernel, types, {"TILE": _TILE}, _WARPS

"""The op mask_tokens in C++: argument checks, then one call."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.library import I, L, P, bind, threads_for

__all__ = ["mask_tokens"]

_mask_tokens = bind("mask_tokens", P, L, P, P, L, I, I)


def mask_tokens(logits: Tensor, batch_indices: Tensor, masks: Tensor) -> None:
    num_masks, vocab_size = len(batch_indices), logits.shape[1]
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise TypeError(f"mask_tokens: logits must be fp32 in contiguous rows, not {logits.dtype}")
    if batch_indices.dtype is not torch.int32 or masks.dtype is not torch.int32 or not masks.is_contiguous():
        raise TypeError("mask_tokens: batch_indices and masks must be int32 and contiguous")
    if masks.shape != (num_masks, -(-vocab_size // 32)):
        raise ValueError(f"mask_tokens: {num_masks} masks of {vocab_size} tokens, not {tuple(masks.shape)}")
    _mask_tokens(
        logits.data_ptr(),
        logits.stride(0),
        batch_indices.data_ptr(),
        masks.data_ptr(),
        num_masks,
        vocab_size,
        threads_for(num_masks * vocab_size),
    )

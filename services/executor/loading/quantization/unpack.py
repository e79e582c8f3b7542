"""Unpacks small integers from the words of checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(words: Tensor) -> Tensor:
    """words [R, C] -> uint8 [R, C * bytes per word], the lowest first"""
    return words.reshape(-1).view(torch.uint8).view(len(words), -1)  # little-endian, as safetensors stores


def unpack(words: Tensor, bits: int) -> Tensor:
    """words integers [R, C] -> uint8 [R, C * codes per word]: code i of a word is in its bits from i * bits on.

    bits: 1, 2, 4 or 8.
    """
    packed = bytes_of(words)
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    codes = packed.new_empty(*packed.shape, per_byte)
    mask = 2**bits - 1
    for i in range(per_byte):
        torch.bitwise_and(packed >> (i * bits), mask, out=codes[..., i])
    return codes.flatten(1)

"""Random quantized weights, for `--load-format dummy`: fast to make, of the spread of a real model's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.services.executor.loading.quantization.settings import groups_of
from pagewire.services.executor.loading.weights.dummy import STD


def random_bytes(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """uint8 [rows, columns], uniform"""
    words = torch.empty(-(-rows * columns // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    return words.view(torch.uint8)[: rows * columns].view(rows, columns)


def random_grouped(
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    generator: torch.Generator,
    *,
    has_offsets: bool,
    permutation: Tensor | None = None,
) -> GroupedWeight:
    """Returns a random weight. shape: (N, K). group_size -1: a single group. has_offsets: a zero point per group
    instead of one for all."""
    num_outputs, num_inputs = shape
    size, groups = groups_of(num_inputs, group_size)
    codes = random_bytes(num_outputs, num_inputs, generator).bitwise_and_(2**bits - 1)
    scale = STD / math.sqrt((4**bits - 1) / 12)  # of uniform integers the standard deviation
    return GroupedWeight(
        codes,
        bits,
        size,
        torch.full((num_outputs, groups), scale, dtype=torch.float16),
        offsets=torch.full((num_outputs, groups), 2 ** (bits - 1), dtype=torch.uint8) if has_offsets else None,
        zero_point=0 if has_offsets else 2 ** (bits - 1),
        permutation=permutation,
    )

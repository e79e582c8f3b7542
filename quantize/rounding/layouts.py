"""Quantized weights in the usual layouts of checkpoints: AutoAWQ's "gemm" and AutoGPTQ's.

N outputs, K inputs, G groups, `32 / bits` codes per int32 word, the first in the lowest bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.quantize.rounding.grid import Grid

# Nibble i of an AutoAWQ word holds column _AWQ_ORDER[i] of the word's eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_tensors(weight: GroupedWeight) -> dict[str, Tensor]:
    """Returns the tensors of AutoAWQ: qweight int32 [K, N/8] and qzeros int32 [G, N/8], both interleaved; scales
    float16 [G, N]."""
    order = list(_AWQ_ORDER)

    def packed(codes: Tensor) -> Tensor:
        return _packed(codes.reshape(codes.shape[0], -1, 8)[:, :, order].reshape(codes.shape), 4)

    return {
        "qweight": packed(weight.codes.T),
        "qzeros": packed(_zeros(weight).T),
        "scales": weight.scales.T.contiguous(),
    }


def gptq_tensors(weight: GroupedWeight) -> dict[str, Tensor]:
    """Returns the tensors of AutoGPTQ: qweight int32 [K * bits/32, N], packed along K; qzeros int32 [G, N * bits/32],
    zeros stored minus one; scales float16 [G, N]; g_idx int32 [K], the group of each input. The zeros must be at least
    1.
    """
    num_inputs = weight.codes.shape[1]
    codes = weight.codes
    g_idx = torch.arange(num_inputs, dtype=torch.int32, device=codes.device) // weight.group_size
    if weight.permutation is not None:
        permutation = weight.permutation.long()
        codes = torch.empty_like(codes).index_copy_(1, permutation, codes)
        g_idx = torch.empty_like(g_idx).index_copy_(0, permutation, g_idx)
    return {
        "qweight": _packed(codes, weight.bits).T.contiguous(),
        "qzeros": _packed((_zeros(weight) - 1).T, weight.bits),
        "scales": weight.scales.T.contiguous(),
        "g_idx": g_idx,
    }


@dataclass(frozen=True)
class Layout:
    """A format of checkpoints (`loading.quantization.registry` reads it) as it is written here."""

    name: str  # quant_method in config.json
    bits: tuple[int, ...]
    min_zero: int  # the lowest zero point that can be stored
    tensors: Callable[[GroupedWeight], dict[str, Tensor]]  # by suffix of their names


_GPTQ = Layout("gptq", (4, 8), 1, gptq_tensors)  # stores zero points less one
LAYOUTS = {"awq": Layout("awq", (4,), 0, awq_tensors), "gptq": _GPTQ, "rtn": _GPTQ}  # by --method


def awq_config(grid: Grid) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": grid.bits,
        "group_size": grid.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def gptq_config(grid: Grid, *, desc_act: bool, damp: float) -> dict[str, Any]:
    """Returns the quantization config of AutoGPTQ's layout. desc_act: whether groups are not of neighbouring inputs,
    so that g_idx is needed."""
    return {
        "quant_method": "gptq",
        "bits": grid.bits,
        "group_size": grid.group_size,
        "sym": grid.symmetric,
        "desc_act": desc_act,
        "damp_percent": damp,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }


def _zeros(weight: GroupedWeight) -> Tensor:
    """uint8 [N, G]"""
    if weight.offsets is None:
        return torch.full(weight.scales.shape, weight.zero_point, dtype=torch.uint8, device=weight.codes.device)
    return weight.offsets


def _packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [R, C] -> int32 [R, C * bits/32]: neighbours of a row in one word."""
    words = codes.reshape(codes.shape[0], -1, 32 // bits).long()
    shifts = torch.arange(0, 32, bits, device=codes.device)
    return (words << shifts).sum(dim=2).to(torch.int32)

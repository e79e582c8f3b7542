"""Dense weights of a loaded model as numbers, whatever layout they are in."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.cpu.layouts import packed_layout
from pagewire.kernels.cpu.products.packed_linear import packs_fixed_point
from pagewire.services.executor.layers.weights import Dense, PackedDense, PackedWeight
from pagewire.services.executor.models.decoder import DecoderModel


def matrix(part: PackedWeight) -> Tensor:
    """[N, K]"""
    if isinstance(part, PackedDense):
        return packed_layout.unpack(part.tensor, *part.shape)
    assert isinstance(part, Dense)
    return part.tensor


def dense_tensors(model: DecoderModel) -> dict[str, Tensor]:
    """Returns all tensors of a model without quantized weights, by the checkpoint's names."""
    tensors = model.vectors()
    for module in model.modules():
        rows = torch.cat([matrix(part) for part in module.parts])
        pieces = rows.split([shard.out_features for shard in module.shards])
        tensors |= {f"{shard.name}.weight": piece for shard, piece in zip(module.shards, pieces, strict=True)}
    return tensors


def are_held(tensor: Tensor, expected: Tensor) -> bool:
    """Returns whether a loaded tensor has the expected numbers, or what fixed point leaves of them."""
    if expected.dtype is not torch.bfloat16 or expected.dim() != 2 or not packs_fixed_point():
        return torch.equal(tensor, expected)
    rounded = packed_layout.unpack(packed_layout.pack(expected, fixed_point=True), *expected.shape)
    return torch.equal(tensor, expected) or torch.equal(tensor, rounded)


def padding_bytes(model: DecoderModel) -> int:
    """Returns the bytes that layouts take beyond the numbers."""
    parts = [part for module in model.modules() for part in module.parts]
    return sum(part.nbytes - part.shape[0] * part.shape[1] * 2 for part in parts if isinstance(part, PackedDense))

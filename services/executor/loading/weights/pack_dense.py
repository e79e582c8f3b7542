"""Dense weights in the layout of the CPU's kernels, once they are loaded."""

from __future__ import annotations

import platform

import torch

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.layers.weights import Dense, PackedDense, PackedWeight
from pagewire.services.executor.models.protocol import OwnModel


def packs_dense(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether products of `dtype` are faster packed: of bfloat16 on x86, from AVX2 to AMX; on others it is not
    measured."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return dtype is torch.bfloat16 and device.type == "cpu" and is_x86 and cpu_backend() == "cpp"


def dense_layout(dtype: torch.dtype, device: torch.device) -> str:
    """Returns a name of the layout that dense weights have on this processor."""
    if not packs_dense(dtype, device):
        return "rows"
    from pagewire.kernels.cpu.products.packed_linear import packs_fixed_point

    return "fixed point" if packs_fixed_point() else "bfloat16"


def pack_dense(model: OwnModel) -> None:
    """Packs dense weights that are multiplied with: in place, or, if that is impossible, one by one."""
    for module in model.modules():
        if module.multiplies:  # otherwise rows are looked up, which is faster where they are contiguous
            module.install([_packed(part) for part in module.parts])


def _packed(part: PackedWeight) -> PackedWeight:
    """Packs the weight unless it is packed already, or its dtype differs from the model's."""
    from pagewire.kernels.cpu.products.packed_linear import pack, packs_fixed_point

    if isinstance(part, Dense) and part.tensor.dtype is torch.bfloat16:
        return PackedDense(part.shape, pack(part.tensor, fixed_point=packs_fixed_point()))
    return part

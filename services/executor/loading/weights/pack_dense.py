"""Dense weights in the layout of the CPU's kernels, once they are loaded."""

from __future__ import annotations

import platform

import torch

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.layers.weights import Dense, PackedDense
from pagewire.services.executor.models.protocol import OwnModel


def packs_dense(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of `dtype` are faster so: of bfloat16 on x86, from AVX2 to AMX; on others it is not measured."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return dtype is torch.bfloat16 and device.type == "cpu" and is_x86 and cpu_backend() == "cpp"


def pack_dense(model: OwnModel) -> None:
    """Replaces dense weights that are multiplied with: where they are, or, if they have to be padded, one by one."""
    from pagewire.kernels.cpu.packed_linear import pack

    for module in model.modules():
        if not module.multiplies:
            continue  # rows are looked up faster where they are contiguous
        if any(isinstance(part, Dense) for part in module.parts):
            module.install(
                [
                    PackedDense(part.shape, pack(part.tensor)) if isinstance(part, Dense) else part
                    for part in module.parts
                ]
            )

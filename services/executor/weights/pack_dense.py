"""Dense weights in the layout of the CPU's kernels, once they are loaded."""

from __future__ import annotations

import logging

import torch

import kernels
from services.executor.layers.weights import Dense, PackedDense
from services.executor.models.decoder import DecoderModel

logger = logging.getLogger(__name__)


def packs_dense(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether that makes products of `dtype` faster; where the processor is the reason why not, the log says so."""
    if dtype is not torch.bfloat16 or device.type != "cpu" or kernels.cpu_backend() != "cpp":
        return False
    # Imported here: importing it compiles the kernels.
    from kernels.cpu.packed_linear import has_bf16_products

    if has_bf16_products():
        return True
    logger.info("CPU kernels: this processor has no AVX512-BF16, products with bfloat16 weights are slower without")
    return False


def pack_dense(model: DecoderModel) -> None:
    """Replaces dense weights that are multiplied with: where they are, or, if they have to be padded, one by one."""
    from kernels.cpu.packed_linear import pack

    for module in model.modules():
        if module is model.embed and model.lm_head is not None:
            continue  # its rows are only looked up, which is faster where they are contiguous
        if any(isinstance(part, Dense) for part in module.parts):
            module.install(
                [
                    PackedDense(part.shape, pack(part.tensor)) if isinstance(part, Dense) else part
                    for part in module.parts
                ]
            )

"""The forms in which a model's weights are held, reported once after loading: in the log and in metrics."""

from __future__ import annotations

import logging
import math
from collections import Counter

from pagewire.kernels.quantized import PackedFp8, PackedGrouped, PackedInt8, PackedWeight
from pagewire.services.executor import stats
from pagewire.services.executor.device.memory import mib
from pagewire.services.executor.layers.weight_format import Quantization
from pagewire.services.executor.loading.weights import WeightSource
from pagewire.services.executor.models.protocol import OwnModel

logger = logging.getLogger(__name__)


def report(
    model: OwnModel, quantization: Quantization | None, weights: WeightSource | None, *, dequantized: str
) -> None:
    """Reports weights. quantization, weights: the checkpoint's. dequantized: why all were
    dequantized; empty if they were not."""
    method = "none" if quantization is None else quantization.method
    parts = [part for module in model.modules() for part in module.parts]
    forms = Counter(map(form, parts))
    for name, count in forms.items():
        stats.WEIGHTS.labels(method, name).set(count)
    converted = [] if dequantized or weights is None else _converted(model, weights)
    stats.DEQUANTIZED_WEIGHTS.set(len(converted))
    if quantization is not None:
        sixteen_bits = model.weight_bytes + sum(2 * part.shape[0] * part.shape[1] - part.nbytes for part in parts)
        logger.info(
            "quantization %s%s: %s; %s of weights, %s in 16 bits",
            method,
            f", dequantized {dequantized}" if dequantized else "",
            ", ".join(f"{count} {name}" for name, count in sorted(forms.items())),
            *map(mib, (model.weight_bytes, sixteen_bits)),
        )


def form(part: PackedWeight) -> str:
    """Returns in a few words how a weight is held."""
    if isinstance(part, PackedGrouped):
        bits = f"{part.bits}-bit"
        if part.codebook is not None:
            bits = "fp8" if part.bits == 8 else f"{bits} codebook"
        groups = f"groups of {part.group_size}" if part.group_size < part.shape[1] else "a group per output"
        return f"{bits}, {groups}" + (", act-order" if part.permutation is not None else "")
    if isinstance(part, PackedFp8):
        return "fp8, blocks of 128x128" if part.scales.dim() == 2 else "fp8"
    return "int8" if isinstance(part, PackedInt8) else "dense"


def _converted(model: OwnModel, weights: WeightSource) -> list[str]:
    """Returns the dense weights that are quantized in the checkpoint."""
    names = [f"{shard.name}.weight" for module in model.modules() for shard in module.shards if shard.format is None]
    return [
        name
        for name in names
        if name in weights.shapes and weights.stored_bytes(name) < 2 * math.prod(weights.shapes[name])
    ]

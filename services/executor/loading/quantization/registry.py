"""The formats of quantized checkpoints: a module next to this one and an entry here.

Which of them a checkpoint is in follows from `quantization_config` of its `config.json`. A GGUF file has none: its
tensors have types of their own (`gguf.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pagewire.config import model_refusals
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import Quantization
from pagewire.services.executor.loading.quantization import awq, bitsandbytes, compressed_tensors, fp8, gptq, mxfp4

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointFormat:
    """One format of quantized checkpoints."""

    name: str  # quant_method in `quantization_config`
    quantization: Callable[[Mapping[str, Any], Collection[str] | None], Quantization]  # see `quantization_of`
    bits: tuple[int, ...]  # of a weight, that can be read
    suffixes: tuple[str, ...]  # ends of names of tensors that only quantized weights have


FORMATS = {
    known.name: known
    for known in (
        CheckpointFormat(
            "awq",
            awq.quantization,
            bits=awq.BITS,
            suffixes=(".qweight",),
        ),
        CheckpointFormat(
            "gptq",
            gptq.quantization,
            bits=gptq.BITS,
            suffixes=(".qweight",),
        ),
        CheckpointFormat(
            "compressed-tensors",
            compressed_tensors.quantization,
            bits=compressed_tensors.BITS,
            suffixes=(".weight_scale",),
        ),
        CheckpointFormat("fp8", fp8.quantization, bits=(8,), suffixes=(".weight_scale", ".weight_scale_inv")),
        CheckpointFormat("fbgemm_fp8", fp8.quantization, bits=(8,), suffixes=(".weight_scale", ".weight_scale_inv")),
        CheckpointFormat("mxfp4", mxfp4.quantization, bits=(4,), suffixes=(".blocks",)),
        CheckpointFormat("bitsandbytes", bitsandbytes.quantization, bits=(4, 8), suffixes=(".weight.absmax", ".SCB")),
    )
}


def quantization_of(config: Mapping[str, Any], names: Collection[str] | None) -> Quantization:
    """Returns the quantization of a checkpoint. config: the value of `quantization_config`. names: all tensors of the
    checkpoint, None if there are none (dummy).

    Raises ModelLoadError naming the key for what is unknown or not supported.
    """
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"config key quantization_config: expected an object, found {config!r}")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS:
        raise ModelLoadError(
            f"config key quantization_config.quant_method: {method!r} is not one of {', '.join(FORMATS)}; use a "
            "checkpoint of one of these, or one in 16 bits"
        )
    return FORMATS[method].quantization(config, names)


def is_left_over(config: Mapping[str, Any], names: Collection[str], requested: str | None) -> bool:
    """Returns whether `quantization_config` describes quantized weights, but all are dense: for `--quantization none`
    it then means nothing. Otherwise raises ModelLoadError: the model would silently take four times the memory.

    config: one that `quantization_of` takes. names: all tensors of the checkpoint.
    """
    method = config["quant_method"]
    if any(name.endswith(FORMATS[method].suffixes) for name in names):
        return False
    described = quantization_of(config, None)
    dense = [name for name in names if name.endswith("_proj.weight")]
    dense = [name for name in dense if described.format(name.removesuffix(".weight")) is not None]
    if not dense:
        return False
    says = f"says that weights are quantized with {method}, but none is: tensor {dense[0]} is dense"
    if requested != "none":
        raise ModelLoadError(
            f"config key quantization_config: {says}; add --quantization none to serve it so, or use the quantized "
            "checkpoint"
        )
    logger.warning("config key quantization_config %s; it is ignored", says)
    return True


def check_requested(requested: str | None, found: Quantization | None) -> None:
    """Raises ModelLoadError if `--quantization` asks for another format than the checkpoint is in."""
    if refused := model_refusals.of_quantization(requested, None if found is None else found.method):
        raise ModelLoadError(refused)

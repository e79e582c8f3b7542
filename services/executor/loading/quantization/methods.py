"""Which format a checkpoint is in: `quantization_config` of `config.json`, and what `--quantization` insists on."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Collection, Mapping
from typing import Any

from pagewire.services.executor.loading.model_config import ModelLoadError
from pagewire.services.executor.loading.quantization.formats import Quantization

logger = logging.getLogger(__name__)

# quant_method -> module with `quantization(config, names)`
_METHODS = {
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "bitsandbytes": "bitsandbytes",
}
# quant_method -> how the name of a tensor ends that only a quantized weight has
_SUFFIXES = {
    "awq": (".qweight",),
    "gptq": (".qweight",),
    "compressed-tensors": (".weight_scale",),
    "fp8": (".weight_scale", ".weight_scale_inv"),
    "fbgemm_fp8": (".weight_scale", ".weight_scale_inv"),
    "bitsandbytes": (".weight.absmax", ".SCB"),
}
# vLLM's further names for the same checkpoints
_ALIASES = {"awq_marlin": "awq", "auto_awq": "awq", "gptq_marlin": "gptq", "auto_gptq": "gptq"}


def quantization_of(config: Mapping[str, Any], names: Collection[str] | None) -> Quantization:
    """config: the value of `quantization_config`. names: all tensors of the checkpoint, None if there are none (dummy).

    Raises ModelLoadError naming the key for what is unknown or not supported.
    """
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"config key quantization_config: expected an object, found {config!r}")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelLoadError(
            f"config key quantization_config.quant_method: {method!r} is not one of {', '.join(_METHODS)}; use a "
            "checkpoint of one of these, or one in 16 bits"
        )
    module = importlib.import_module(f"pagewire.services.executor.loading.quantization.{_METHODS[method]}")
    quantization: Quantization = module.quantization(config, names)
    return quantization


def is_left_over(config: Mapping[str, Any], names: Collection[str], requested: str | None) -> bool:
    """Whether `quantization_config` describes quantized weights, but all are dense: for `--quantization none` it then
    means nothing. Otherwise raises ModelLoadError: nobody would notice that the model takes four times the memory.

    config: one that `quantization_of` takes. names: all tensors of the checkpoint.
    """
    method = config["quant_method"]
    if any(name.endswith(_SUFFIXES[method]) for name in names):
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
    if requested is None or requested == "none":
        return
    method = None if found is None else found.method
    if _ALIASES.get(requested, requested) != method:
        what = "is not quantized" if method is None else f"is quantized with {method}"
        raise ModelLoadError(
            f"--quantization {requested}: the checkpoint {what}; leave the flag out, or make a quantized checkpoint "
            "with `pagewire quantize`"
        )

"""Which format a checkpoint is in: `quantization_config` of `config.json`, and what `--quantization` insists on."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from typing import Any

from services.executor.model_config import ModelLoadError
from services.executor.quantization.formats import Quantization

# quant_method -> module with `quantization(config, names)`
_METHODS = {
    "awq": "awq",
    "gptq": "gptq",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "bitsandbytes": "bitsandbytes",
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
            f"config key quantization_config.quant_method: {method!r} is not one of {', '.join(_METHODS)}"
        )
    module = importlib.import_module(f"services.executor.quantization.{_METHODS[method]}")
    quantization: Quantization = module.quantization(config, names)
    return quantization


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

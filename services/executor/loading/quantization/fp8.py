"""FP8 with `quant_method` fp8 (DeepSeek, Qwen, AutoFP8, transformers' fine-grained) or fbgemm_fp8 (Meta).

Sources: transformers 5 `integrations/finegrained_fp8.py` and `integrations/fbgemm_fp8.py`, vLLM's `fp8.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pagewire.kernels.quantized import FP8_BLOCK
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import WeightFormat
from pagewire.services.executor.loading.quantization.eight_bit import Fp8Format
from pagewire.services.executor.loading.quantization.settings import one_of, stored_quantized, strings_of

_BLOCK_SCALE = "weight_scale_inv"  # despite its name, it multiplies like any other scale


def quantization(config: Mapping[str, Any], names: Collection[str] | None) -> Fp8Quantization:
    """Raises ModelLoadError naming the key for what is not supported."""
    block_size = config.get("weight_block_size")
    if block_size not in (None, [FP8_BLOCK, FP8_BLOCK]):
        raise ModelLoadError(
            f"config key quantization_config.weight_block_size: {block_size!r} is not supported, expected "
            f"{[FP8_BLOCK, FP8_BLOCK]} or null"
        )
    one_of(config, "fmt", ["e4m3", "float8_e4m3fn"], default="e4m3")
    scheme = one_of(config, "activation_scheme", ["dynamic", "static"], default="dynamic")
    dense = strings_of(config, "modules_to_not_convert") + strings_of(config, "ignored_layers")
    return Fp8Quantization(
        one_of(config, "quant_method", ["fp8", "fbgemm_fp8"]), block_size is not None, scheme == "static", dense, names
    )


class Fp8Quantization:
    """The same quantization of all linear layers, except those left dense."""

    def __init__(
        self, method: str, blocks: bool, static: bool, dense: tuple[str, ...], names: Collection[str] | None
    ) -> None:
        self.method = method
        self._blocks = blocks
        self._static = static
        self._dense = dense
        self._names = names

    def format(self, module: str) -> WeightFormat | None:
        # transformers uses the blocks' name for a whole tensor's scale, and a different name for activations' scales.
        scale = self._first(
            module, *((_BLOCK_SCALE, "weight_scale") if self._blocks else ("weight_scale", _BLOCK_SCALE))
        )
        if not stored_quantized(module, scale, self._names, self._dense):
            return None
        return Fp8Format(
            self._blocks, scale, self._first(module, "input_scale", "activation_scale") if self._static else None
        )

    def _first(self, module: str, *suffixes: str) -> str:
        """Returns the suffix that the checkpoint has, by default the first."""
        return next((suffix for suffix in suffixes if f"{module}.{suffix}" in (self._names or ())), suffixes[0])

"""The format compressed-tensors, which llm-compressor writes: the config states which modules are quantized, and how.

Source: compressed-tensors 0.20, `quantization/quant_config.py`, `quantization/quant_scheme.py`, `utils/match.py`.
Activation-ordered groups (`weight_g_idx`) as in vLLM's `compressed_tensors_wNa16.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagewire.kernels.quantized import FP8_BLOCK
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import WeightFormat
from pagewire.services.executor.loading.quantization.eight_bit import Fp8Format, Int8Format
from pagewire.services.executor.loading.quantization.integers import IntegerFormat
from pagewire.services.executor.loading.quantization.settings import EMBEDDINGS, group_size_of, one_of, strings_of

_PACKED = "pack-quantized"
BITS = (2, 4, 8)
_FORMATS = (_PACKED, "int-quantized", "float-quantized", "naive-quantized")
_KEY = "config key quantization_config"


def quantization(config: Mapping[str, Any], names: Collection[str] | None) -> CompressedTensorsQuantization:
    """Raises ModelLoadError naming the key for what is not supported."""
    sparsity = config.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format", "dense") == "dense"):
        raise ModelLoadError(f"{_KEY}.sparsity_config: {sparsity} is not supported; use a checkpoint without sparsity")
    transform = config.get("transform_config")
    if transform and not (isinstance(transform, Mapping) and not transform.get("config_groups")):
        raise ModelLoadError(f"{_KEY}.transform_config: rotations of activations are not supported")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelLoadError(f"{_KEY}.config_groups: expected an object with at least one group, found {groups!r}")
    formats: dict[str, WeightFormat] = {}
    for name, group in groups.items():
        where = f"{_KEY}.config_groups.{name}"
        if not isinstance(group, Mapping):
            raise ModelLoadError(f"{where}: expected an object, found {group!r}")
        if group.get("weights") is None:
            continue  # attention of a quantized KV cache
        try:
            weight_format = _format_of(group, config.get("format"))
            targets = strings_of(group, "targets")
        except ModelLoadError as error:
            raise ModelLoadError(f"{where}: {error}") from error
        formats |= {target: formats.get(target, weight_format) for target in targets}
    _check_patterns([*formats, *strings_of(config, "ignore")])
    return CompressedTensorsQuantization(formats, strings_of(config, "ignore"), names)


class CompressedTensorsQuantization:
    """Matches names of modules, regular expressions of them after "re:", or their classes."""

    method = "compressed-tensors"

    def __init__(
        self, formats: Mapping[str, WeightFormat], ignored: Sequence[str], names: Collection[str] | None
    ) -> None:
        # The most specific target wins: a name, then a pattern, then a class; otherwise the first in the alphabet.
        self._formats = sorted(formats.items(), key=lambda item: ("re:" in item[0], item[0]))
        self._ignored = ignored
        self._names = names

    def format(self, module: str) -> WeightFormat | None:
        names = self._names or ()
        # Routers of experts are of no class that is quantized, so "ignore" need not name them.
        if f"{module}.weight" in names and f"{module}.weight_scale" not in names:
            return None
        kind = "Embedding" if module.endswith(EMBEDDINGS) else "Linear"
        if any(_names(target, module) or target == kind for target in self._ignored):
            return None
        found = [weight_format for target, weight_format in self._formats if _names(target, module)]
        found += [weight_format for target, weight_format in self._formats if target == kind]
        if found and isinstance(found[0], IntegerFormat) and f"{module}.weight_g_idx" in names:
            return replace(found[0], act_order=True)
        return found[0] if found else None


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _check_patterns(targets: Sequence[str]) -> None:
    for target in targets:
        try:
            re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
        except re.error as error:
            raise ModelLoadError(f"{_KEY}: target {target!r} is not a regular expression ({error})") from error


def _format_of(group: Mapping[str, Any], default_format: object) -> WeightFormat:
    weights, inputs = group["weights"], group.get("input_activations")
    if not isinstance(weights, Mapping) or not isinstance(inputs, Mapping | None):
        raise ModelLoadError("weights and input_activations must be objects or null")
    if group.get("output_activations") is not None:
        raise ModelLoadError("output_activations: quantized outputs are not supported")
    stored = one_of({"format": group.get("format") or default_format}, "format", _FORMATS)
    kind = one_of(weights, "type", ["int", "float"], default="int")
    bits = one_of(weights, "num_bits", BITS if stored == _PACKED else [8], default=8)
    symmetric = one_of(weights, "symmetric", [True, False], default=True)
    strategy = one_of(weights, "strategy", ["tensor", "channel", "group", "block"], default=_default_strategy(weights))
    input_scale = _input_scale(inputs, kind)
    if kind == "float":
        if stored == _PACKED or not symmetric or strategy == "group":
            raise ModelLoadError(
                f"weights: float numbers of strategy {strategy!r} in format {stored!r}, symmetric {symmetric}, are not "
                "supported, expected symmetric ones by tensor, channel or block in float-quantized"
            )
        block, found = [FP8_BLOCK, FP8_BLOCK], weights.get("block_structure")
        if strategy == "block" and found not in (block, f"{FP8_BLOCK}x{FP8_BLOCK}"):
            raise ModelLoadError(f"weights.block_structure: {found!r} is not supported, expected {block}")
        return Fp8Format(strategy == "block", input_scale=input_scale)
    if strategy == "block":
        raise ModelLoadError("weights.strategy: 'block' is not supported for integers")
    if inputs is None:
        group_size = group_size_of(weights) if strategy == "group" else -1
        return IntegerFormat(bits, group_size, symmetric, packed=stored == _PACKED, per_tensor=strategy == "tensor")
    if stored == _PACKED or not symmetric or strategy == "group":
        raise ModelLoadError(
            f"weights: integers of strategy {strategy!r} in format {stored!r}, symmetric {symmetric}, are not "
            "supported with input_activations, expected symmetric ones by tensor or channel in int-quantized"
        )
    return Int8Format(input_scale)


def _default_strategy(weights: Mapping[str, Any]) -> str:
    group_size = weights.get("group_size")
    return "tensor" if group_size is None else ("channel" if group_size == -1 else "group")


def _input_scale(inputs: Mapping[str, Any] | None, kind: str) -> str | None:
    """Suffix of the scale's name, if it was fixed at calibration."""
    if inputs is None:
        return None
    one_of(inputs, "num_bits", [8], default=8)
    one_of(inputs, "type", [kind], default="int")
    if not one_of(inputs, "symmetric", [True, False], default=True):
        raise ModelLoadError(
            "input_activations.symmetric: activations with a zero point are not supported; quantize the model again "
            "with symmetric activations"
        )
    return None if one_of(inputs, "dynamic", [True, False], default=False) else "input_scale"

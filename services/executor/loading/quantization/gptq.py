"""GPTQ as AutoGPTQ and GPTQModel write it: 2, 4 or 8 bits, a scale and a zero point per group of inputs.

Sources: `QuantLinear.pack` of auto-gptq 0.7.1; of GPTQModel 7.7 `utils/model.py` (v1 and v2) and
`quantization/config.py` (`dynamic`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels.quantized import GroupedWeight
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weight_format import Along, Part, TensorSpec, WeightFormat
from pagewire.services.executor.loading.quantization.dummy import random_grouped
from pagewire.services.executor.loading.quantization.settings import (
    SCALE_DTYPES,
    along_groups,
    check_multiple,
    checked_scales,
    first_group,
    group_size_of,
    groups_of,
    one_of,
    stored_quantized,
    strings_of,
)
from pagewire.services.executor.loading.quantization.unpack import unpack

BITS = (2, 4, 8)
_FORMATS = ("gptq", "gptq_v2")  # v1 stores zero points less one, v2 as they are
_STORAGE_KEYS = ("format", "checkpoint_format", "quant_method", "method", "pack_dtype")  # `dynamic` may not change


def quantization(config: Mapping[str, Any], names: Collection[str] | None) -> GptqQuantization:
    """Raises ModelLoadError naming the key for what is not supported."""
    one_of(config, "pack_dtype", ["int32"], default="int32")
    return GptqQuantization(
        _format_of(config),
        _rules_of(config),
        strings_of(config, "modules_to_not_convert"),
        one_of(config, "lm_head", [True, False], default=False),
        names,
    )


def _format_of(config: Mapping[str, Any]) -> GptqFormat:
    key = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    if config.get("is_marlin_format"):
        raise ModelLoadError(
            "config key quantization_config.is_marlin_format: GPTQ in Marlin's layout is not supported; use the "
            "checkpoint that it was made from"
        )
    return GptqFormat(
        one_of(config, "bits", BITS),
        group_size_of(config, default=-1),
        symmetric=one_of(config, "sym", [True, False], default=False),
        act_order=one_of(config, "desc_act", [True, False], default=False),
        is_v2=one_of(config, key, _FORMATS, default="gptq") == "gptq_v2",
    )


def _rules_of(config: Mapping[str, Any]) -> list[tuple[re.Pattern[str], GptqFormat | None]]:
    """`dynamic`: patterns of module names, in order, with what they override; None where they leave modules dense."""
    rules: list[tuple[re.Pattern[str], GptqFormat | None]] = []
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ModelLoadError(f"config key quantization_config.dynamic: expected an object, found {dynamic!r}")
    for rule, overrides in dynamic.items():
        where = f"config key quantization_config.dynamic: rule {rule!r}"
        try:
            pattern = re.compile(rule[2:] if rule.startswith(("+:", "-:")) else rule)
        except re.error as error:
            raise ModelLoadError(f"{where} is not a regular expression ({error})") from error
        if rule.startswith("-:"):
            rules.append((pattern, None))
            continue
        if not isinstance(overrides, Mapping):
            raise ModelLoadError(f"{where}: expected an object, found {overrides!r}")
        if storage := [key for key in _STORAGE_KEYS if overrides.get(key, config.get(key)) != config.get(key)]:
            raise ModelLoadError(f"{where}: {storage[0]} cannot differ between modules")
        try:
            rules.append((pattern, _format_of({**config, **overrides})))
        except ModelLoadError as error:
            raise ModelLoadError(f"{where}: {error}") from error
    return rules


class GptqQuantization:
    """The same quantization of all linear layers, except `dynamic` rules and those left dense."""

    method = "gptq"

    def __init__(
        self,
        default: GptqFormat,
        rules: list[tuple[re.Pattern[str], GptqFormat | None]],
        dense: tuple[str, ...],
        lm_head: bool,
        names: Collection[str] | None,
    ) -> None:
        self._default = default
        self._rules = rules
        self._dense = dense
        self._lm_head = lm_head
        self._names = names

    def format(self, module: str) -> WeightFormat | None:
        if not stored_quantized(module, "qweight", self._names, self._dense, self._lm_head):
            return None
        return next((rule for pattern, rule in self._rules if pattern.match(module)), self._default)


@dataclass(frozen=True)
class GptqFormat:
    """A weight of GPTQ. symmetric: all zero points are the middle of the codes. act_order: inputs were quantized in
    another order."""

    bits: int
    group_size: int
    symmetric: bool
    act_order: bool
    is_v2: bool

    def tensors(self, out_features: int, in_features: int) -> Mapping[str, TensorSpec]:
        per_word = 32 // self.bits
        check_multiple("the number of inputs", in_features, per_word)
        check_multiple("the number of outputs", out_features, per_word)
        size, groups = groups_of(in_features, self.group_size)
        bits, group_size = f"bits {self.bits}", f"group_size {self.group_size}"
        by_group = along_groups(0, size, groups)
        # Any inputs may be in a group.
        in_order = Along(0, in_features, in_features) if self.act_order and groups > 1 else Along(0)
        return {
            "qweight": TensorSpec(
                (in_features // per_word, out_features),
                (torch.int32,),
                follows=bits,
                outputs=Along(1),
                inputs=Along(0, per_word),
            ),
            "qzeros": TensorSpec(
                (groups, out_features // per_word),
                (torch.int32,),
                follows=group_size,
                outputs=Along(1, per_word),
                inputs=by_group,
            ),
            "scales": TensorSpec(
                (groups, out_features), SCALE_DTYPES, follows=group_size, outputs=Along(1), inputs=by_group
            ),
            "g_idx": TensorSpec((in_features,), (torch.int32, torch.int64), optional=True, inputs=in_order),
            "bias": TensorSpec((out_features,), SCALE_DTYPES, optional=True, outputs=Along(0)),
        }

    def read(
        self, tensors: Mapping[str, Tensor], out_features: int, in_features: int, part: Part | None = None
    ) -> GroupedWeight:
        if "bias" in tensors and bool(tensors["bias"].any()):
            raise ModelLoadError(
                "bias: is not zero, but config.json describes a layer without bias; the checkpoint does not fit its "
                "config"
            )
        size, groups = groups_of(in_features, self.group_size)
        codes = unpack(tensors["qweight"].t(), self.bits)
        permutation = None
        if "g_idx" in tensors:
            g_idx = tensors["g_idx"] - first_group(part, self.group_size)
            permutation = group_order("g_idx", g_idx, size, groups)
        if permutation is not None:
            codes = codes.index_select(1, permutation)
        zeros = self._zeros(tensors["qzeros"])
        return GroupedWeight(
            codes,
            self.bits,
            size,
            checked_scales("scales", tensors["scales"]).t().contiguous(),
            offsets=None if self.symmetric else zeros.t().contiguous(),
            zero_point=2 ** (self.bits - 1) if self.symmetric else 0,
            permutation=permutation,
        )

    def random(self, out_features: int, in_features: int, generator: torch.Generator) -> GroupedWeight:
        permutation = None
        if self.act_order:  # the same for all that read one input, as calibration makes it
            order = torch.Generator().manual_seed(in_features)
            permutation = torch.randperm(in_features, generator=order, dtype=torch.int32)
        return random_grouped(
            (out_features, in_features),
            self.bits,
            self.group_size,
            generator,
            has_offsets=not self.symmetric,
            permutation=permutation,
        )

    def _zeros(self, words: Tensor) -> Tensor:
        """words int32 [G, N / codes per word] -> uint8 [G, N]"""
        stored = unpack(words, self.bits)
        # GPTQModel takes one from every field by subtracting whole words, so that a zero point of 0 borrows from its
        # neighbour; the sum of words gives it back.
        zeros = stored if self.is_v2 else unpack(words + _ones(self.bits), self.bits)
        middle = 2 ** (self.bits - 1)
        if self.symmetric and not bool((zeros == middle).all()):
            cause = "the checkpoint is damaged, or sym is wrong in its config"
            if bool((stored == (middle - 1 if self.is_v2 else middle)).all()):
                actual = _FORMATS[not self.is_v2]
                cause = f"they are if the format is {actual}: set checkpoint_format to {actual!r} in its config"
            raise ModelLoadError(
                f"qzeros: zero points of symmetric weights must all be {middle}, but in format {_FORMATS[self.is_v2]} "
                f"these are {int(zeros.min())} to {int(zeros.max())}; {cause}"
            )
        return zeros


def _ones(bits: int) -> int:
    """An int32 with a one in every field; the top bit of a field is never that one's, so it is not negative."""
    return sum(1 << shift for shift in range(0, 32, bits))


def group_order(suffix: str, g_idx: Tensor, group_size: int, num_groups: int) -> Tensor | None:
    """int32 [K] that makes groups contiguous; None if they are.

    Raises ModelLoadError if a group has another size than `group_size`; the last has what remains.
    """
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= num_groups:
        raise ModelLoadError(
            f"{suffix}: names groups {low} to {high}, but scales has {num_groups}; the checkpoint is damaged, or its "
            "group_size is wrong"
        )
    regular = torch.arange(len(g_idx), device=g_idx.device) // group_size
    if torch.equal(g_idx.long(), regular):
        return None
    counts, expected = torch.bincount(g_idx.long(), minlength=num_groups), torch.bincount(regular)
    if not torch.equal(counts, expected):
        group = int((counts != expected).nonzero()[0])
        raise ModelLoadError(
            f"{suffix}: group {group} has {int(counts[group])} inputs, expected {int(expected[group])}; groups of "
            "different sizes are not supported, quantize the model again with desc_act false"
        )
    return torch.argsort(g_idx, stable=True).to(torch.int32)

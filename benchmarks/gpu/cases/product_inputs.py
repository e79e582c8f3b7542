"""Inputs of products with quantized weights: random weights of every form, in every contestant's layout.

A weight is made once for all batch sizes. Its scales are exact in float16 and bfloat16, so that contestants that keep
them in one or the other multiply with the same weight.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.gpu.measure import num_sets
from pagewire.kernels import reference
from pagewire.kernels.quantized import (
    FP8_BLOCK,
    Fp8Weight,
    GroupedWeight,
    Int8Weight,
    PackedWeight,
    QuantizedWeight,
    pack,
)

Layout = tuple[Tensor, ...]  # a weight as a contestant wants it


class Form(Protocol):
    """A way to store a weight."""

    rate: str  # the ceiling of its product, see `Ceilings`
    tolerance: float

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        """Returns the bytes of the weight in a checkpoint."""

    def random(self, num_outputs: int, num_inputs: int, device: torch.device) -> QuantizedWeight: ...

    def expected(self, x: Tensor, weight: Any) -> tuple[Tensor, ...]:
        """Returns x times the weight, as `pagewire.kernels.reference.products` says; any of these is right."""


@dataclass(frozen=True)
class Grouped:
    """Codes in groups. offsets: zeros (a zero point per group), symmetric (one for all), or minimums (as Q4_1 has)."""

    bits: int = 4
    group_size: int = 128
    offsets: str = "zeros"
    permuted: bool = False

    rate = "matmul"
    tolerance = 1e-2

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        num_groups = num_outputs * (num_inputs // self.group_size)
        bits_per_offset = {"zeros": self.bits, "symmetric": 0, "minimums": 16}[self.offsets]
        bits = num_outputs * num_inputs * self.bits + num_groups * (16 + bits_per_offset)
        return bits // 8 + (4 * num_inputs if self.permuted else 0)

    def random(self, num_outputs: int, num_inputs: int, device: torch.device) -> GroupedWeight:
        groups, middle = (num_outputs, num_inputs // self.group_size), 2 ** (self.bits - 1)
        scales = _scales(groups, device).half()
        offsets = None
        if self.offsets == "zeros":
            offsets = torch.randint(middle - 2, middle + 3, groups, dtype=torch.uint8, device=device)
        elif self.offsets == "minimums":
            offsets = -middle * scales
        return GroupedWeight(
            torch.randint(0, 2**self.bits, (num_outputs, num_inputs), dtype=torch.uint8, device=device),
            self.bits,
            self.group_size,
            scales,
            offsets=offsets,
            zero_point=middle if self.offsets == "symmetric" else 0,
            permutation=torch.randperm(num_inputs, device=device).int() if self.permuted else None,
        )

    def expected(self, x: Tensor, weight: GroupedWeight) -> tuple[Tensor, ...]:
        return (reference.grouped_linear(x, weight, None),)


@dataclass(frozen=True)
class Fp8:
    """Weights in e4m3. blocks: a scale per 128 x 128 instead of one per output."""

    blocks: bool

    rate = "fp8"
    tolerance = 1e-2

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        num_scales = -(-num_outputs // FP8_BLOCK) * -(-num_inputs // FP8_BLOCK) if self.blocks else num_outputs
        return num_outputs * num_inputs + 4 * num_scales

    def random(self, num_outputs: int, num_inputs: int, device: torch.device) -> Fp8Weight:
        scales: tuple[int, ...] = (num_outputs,)
        if self.blocks:
            scales = (-(-num_outputs // FP8_BLOCK), -(-num_inputs // FP8_BLOCK))
        weight = torch.randn(num_outputs, num_inputs, device=device).to(torch.float8_e4m3fn)
        return Fp8Weight(weight, _scales(scales, device))

    def expected(self, x: Tensor, weight: Fp8Weight) -> tuple[Tensor, ...]:
        """Returns the results with and without a quantized input: the kernel may choose."""
        operands = (x, weight.weight, weight.scales, None, None)
        return tuple(reference.fp8_linear(*operands, False, quantize_input=quantize) for quantize in (True, False))


@dataclass(frozen=True)
class Int8:
    rate = "int8"
    tolerance = 2e-2

    def num_bytes(self, num_outputs: int, num_inputs: int) -> int:
        return num_outputs * num_inputs + 4 * num_outputs

    def random(self, num_outputs: int, num_inputs: int, device: torch.device) -> Int8Weight:
        weight = torch.randint(-127, 128, (num_outputs, num_inputs), dtype=torch.int8, device=device)
        return Int8Weight(weight, _scales((num_outputs,), device))

    def expected(self, x: Tensor, weight: Int8Weight) -> tuple[Tensor, ...]:
        return (reference.int8_linear(x, weight.weight, weight.scales, None, None, False),)


def _scales(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """float32 of the 8 bits of precision that bfloat16 has, in float16's range of normal numbers."""
    return ((torch.rand(shape, device=device) + 0.5) * 0.004).bfloat16().float()


class Weights:
    """One weight [num_outputs, num_inputs] in its contestants' layouts, as many copies of each as defeat caches."""

    def __init__(self, form: Form, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> None:
        """dtype: of the activations."""
        self.form, self.dtype, self.device = form, dtype, device
        self.num_outputs, self.num_inputs = num_outputs, num_inputs
        self._weight: Any = None
        self._layouts: dict[str, list[Layout]] = {}
        self._packed: list[PackedWeight] = []

    def __str__(self) -> str:
        return f"{self.num_outputs}x{self.num_inputs}"

    @property
    def weight(self) -> Any:
        """A QuantizedWeight: what `form.random` gave."""
        if self._weight is None:
            self._weight = self.form.random(self.num_outputs, self.num_inputs, self.device)
        return self._weight

    @property
    def packed(self) -> list[PackedWeight]:
        """Returns the copies for our own kernels."""
        if not self._packed:
            first = pack(self.weight)
            self._packed = [first, *(_copy(first) for _ in range(num_sets(first.nbytes, self.device) - 1))]
        return self._packed

    def layout(self, name: str, build: Callable[[], Layout]) -> list[Layout]:
        """Copies of what `build` makes; made once."""
        if name not in self._layouts:
            first = build()
            count = num_sets(sum(tensor.nbytes for tensor in first), self.device)
            self._layouts[name] = [first, *(tuple(tensor.clone() for tensor in first) for _ in range(count - 1))]
        return self._layouts[name]

    def dense(self) -> Tensor:
        """The weight [num_outputs, num_inputs], in the dtype of the activations."""
        weight: Tensor = self.weight.dequantize()
        return weight.to(self.dtype)

    def random_input(self, num_tokens: int) -> Tensor:
        """Returns activations [num_tokens, num_inputs]."""
        return torch.randn(num_tokens, self.num_inputs, device=self.device).to(self.dtype)

    def free(self) -> None:
        """Gives the memory back; what is asked for later is made again."""
        self._weight = None
        self._layouts.clear()
        self._packed.clear()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _copy(packed: Any) -> Any:
    """With tensors of its own."""
    tensors = {
        field.name: value.clone()
        for field in fields(packed)
        if isinstance(value := getattr(packed, field.name), Tensor)
    }
    return replace(packed, **tensors)

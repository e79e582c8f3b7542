"""Products with experts' weights, all tokens' experts at once: the gate and up projections of Qwen3 30B-A3B, with their
activation; beside it "apart": the activation in a launch of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.cases.case import OURS, Built, Case, Contestant, Target
from benchmarks.gpu.cases.product_inputs import Form, Fp8, Grouped
from benchmarks.gpu.measure import Call, relative_error
from benchmarks.gpu.table import first_line
from pagewire.kernels import ops, reference
from pagewire.kernels.quantized import Fp8Weight, pack

_NUM_EXPERTS, _TOP_K, _OUTPUTS, _INPUTS = 128, 8, 1536, 2048
_SMALL = (4, 2, 128, 256)
_NUM_TOKENS, _SMALL_TOKENS = (1, 16, 64, 512, 4096), (3, 70)
_SETS = 8  # of random experts for the same tokens: those of one would stay in the L2 cache
# Up to so many tokens it is the reading of the chosen experts' weights that takes time; later products do.
_FEW_TOKENS, _MANY_TOKENS = 64, 4096
_FEW_TARGET, _MANY_TARGET = Target("fraction", 0.70), Target("tflops", 434.0)

# Like `ops.experts_linear` without weight and bias: x, order, starts
Product = Callable[[Tensor, Tensor, Tensor], Tensor]
_FORMS: dict[str, Form | None] = {"bf16": None, "fp8-blocks": Fp8(True), "fp8-channels": Fp8(False), "awq": Grouped()}


def cases(device: torch.device, small: bool) -> Iterator[Case]:
    sizes = _SMALL if small else (_NUM_EXPERTS, _TOP_K, _OUTPUTS, _INPUTS)
    for name, form in _FORMS.items():
        experts = _Experts(name, form, *sizes, torch.float32 if small else torch.bfloat16, device)
        for num_tokens in _SMALL_TOKENS if small else _NUM_TOKENS:
            yield experts.case(num_tokens)


class _Experts:
    """A weight of all experts, made for the first case that needs it."""

    def __init__(
        self, name: str, form: Form | None, num_experts: int, top_k: int, outputs: int, inputs: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.name, self.form, self.num_experts, self.top_k = name, form, num_experts, top_k
        self.outputs, self.inputs, self.dtype, self.device = outputs, inputs, dtype, device
        self._weight: Any = None
        self._packed: Any = None

    def case(self, num_tokens: int) -> Case:
        pairs = num_tokens * self.top_k
        chosen = self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens)  # on average
        size = self.dtype.itemsize
        each = (
            size * self.outputs * self.inputs if self.form is None else self.form.num_bytes(self.outputs, self.inputs)
        )
        moved = size * (num_tokens * self.inputs + pairs * self.outputs // 2)
        targets = (_FEW_TARGET,) if num_tokens <= _FEW_TOKENS else (_MANY_TARGET,) * (num_tokens >= _MANY_TOKENS)
        name = f"{self.name} {self.num_experts}x{self.outputs}x{self.inputs} k={self.top_k} T={num_tokens}"
        return Case(
            "experts", name, round(chosen * each) + moved, partial(self._build, num_tokens),
            2 * pairs * self.outputs * self.inputs, targets, "matmul" if self.form is None else self.form.rate,
        )  # fmt: skip

    def _build(self, num_tokens: int) -> Built:
        x = torch.randn(num_tokens, self.inputs, dtype=self.dtype, device=self.device)
        scores = torch.rand(_SETS, num_tokens, self.num_experts, device=self.device)
        ids = scores.argsort(dim=2)[:, :, : self.top_k].int()
        pairs = [reference.sort_by_expert(some.contiguous(), self.num_experts) for some in ids]
        if self._weight is None:
            self._weight = self._random()
        product, expected = partial(self._multiply, gated=True), self._expected

        def error() -> float:
            out = product(x, *pairs[0])
            return min(relative_error(out, right) for right in expected(x, *pairs[0]))

        def apart(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
            return ops.silu_and_mul(self._multiply(x, order, starts, gated=False), None)

        built = Built({OURS: Contestant([partial(product, x, *some) for some in pairs], error)})
        built.contestants["apart"] = Contestant([partial(apart, x, *some) for some in pairs], None)
        if self.form is None and self.device.type == "cuda":
            try:
                built.contestants["grouped_mm"] = self._grouped_mm(x, pairs)
            # Whatever torch refuses: that it is missing is printed.
            except Exception as reason:
                built.notes.append(f"grouped_mm: {first_line(reason)}")
        return built

    def _random(self) -> Any:
        rows = self.num_experts * self.outputs
        if self.form is not None:
            return self.form.random(rows, self.inputs, self.device)
        return torch.randn(rows, self.inputs, dtype=self.dtype, device=self.device) / self.inputs**0.5

    def _multiply(self, x: Tensor, order: Tensor, starts: Tensor, gated: bool) -> Tensor:
        if self.form is None:
            return ops.experts_linear(x, self._weight, None, order, starts, gated)
        if self._packed is None:
            self._packed = pack(self._weight)
        product: Tensor = self._packed.multiply_experts(x, None, order, starts, gated)
        return product

    def _expected(self, x: Tensor, order: Tensor, starts: Tensor) -> list[Tensor]:
        """What the gated product may give."""
        weight, pairs = self._weight, (None, order, starts, True)
        if self.form is None:
            return [reference.experts_linear(x, weight, *pairs)]
        if not isinstance(weight, Fp8Weight):
            return [reference.grouped_experts_linear(x, weight, *pairs)]
        operands = (x, weight.weight, weight.scales, *pairs)
        return [reference.fp8_experts_linear(*operands, quantize_input=quantize) for quantize in (True, False)]

    def _grouped_mm(self, x: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Contestant:
        """torch's, of tokens that are already copied and sorted by expert."""
        weight = self._weight.unflatten(0, (self.num_experts, -1)).transpose(1, 2)
        rows = [x[(order // self.top_k).long()] for order, _ in pairs]
        ends = [starts[1:].contiguous() for _, starts in pairs]
        calls: list[Call] = [
            partial(torch._grouped_mm, some, weight, offs=end) for some, end in zip(rows, ends, strict=True)
        ]
        calls[0]()
        return Contestant(calls, None)

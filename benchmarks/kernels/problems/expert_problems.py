"""Products with experts' weights on random buffers, to be timed; and the shapes that they are tuned for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.measure import Call, relative_error
from pagewire.kernels import reference, tuning
from pagewire.kernels.triton.experts import linear

Shape = Mapping[str, int]

TOLERANCE = 1e-2
NUM_EXPERTS, TOP_K = 32, 4
# (outputs, inputs) of an expert's gate and up, and down, of Qwen3 30B-A3B and of Mixtral 8x7B.
_MODELS = ((1536, 2048), (2048, 768), (28672, 4096), (4096, 14336))
# (x_bytes, weight_bytes): bf16; fp8 with x as it is, and quantized
_FORMS = ((2, 2), (2, 1), (1, 1))


@dataclass(frozen=True)
class ExpertsProblem:
    """Weights of so many experts are larger than any cache, so that one set of buffers will do."""

    x: Tensor
    weight: Tensor
    scales: Tensor | None  # of fp8
    quantize: bool
    order: Tensor
    starts: Tensor

    def calls(self) -> list[Call]:
        return [self.product]

    def product(self) -> Tensor:
        if self.scales is None:
            return linear.experts_linear(self.x, self.weight, None, self.order, self.starts, False)
        operands = (self.x, self.weight, self.scales, None, self.order, self.starts)
        return linear.fp8_product(*operands, False, quantize=self.quantize)

    def is_right(self) -> bool:
        pairs = (None, self.order, self.starts, False)
        if self.scales is None:
            expected = reference.experts_linear(self.x, self.weight, *pairs)
        else:
            expected = reference.fp8_experts_linear(
                self.x, self.weight, self.scales, *pairs, quantize_input=self.quantize
            )
        return relative_error(self.product(), expected) <= TOLERANCE


def expert_problems(shape: Shape, device: torch.device) -> list[ExpertsProblem]:
    """`shape` has the keys of the kernel's table (`pagewire.kernels.tuning`). fp8 has scales per output, and per
    block."""
    half = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies no bf16
    dtype = torch.float32 if shape["x_bytes"] == 4 else half
    num_experts, top_k = (4, 2) if device.type == "cpu" else (NUM_EXPERTS, TOP_K)
    outputs, inputs = shape["outputs"], shape["inputs"]
    num_tokens = -(-shape["tokens"] * num_experts // top_k)
    # Every expert gets as many pairs, at random.
    ids = torch.rand(num_tokens, num_experts, device=device).argsort(dim=1)[:, :top_k].int().contiguous()
    pairs = reference.sort_by_expert(ids, num_experts)
    x = torch.randn(num_tokens, inputs, device=device).to(dtype)
    weight = (torch.randn(num_experts * outputs, inputs, device=device) / inputs**0.5).to(dtype)
    if shape["weight_bytes"] == x.itemsize:
        return [ExpertsProblem(x, weight, None, False, *pairs)]
    codes = (weight.float() * inputs**0.5).to(torch.float8_e4m3fn)
    problems = []
    for size in ((num_experts * outputs,), (num_experts * outputs // 128, -(-inputs // 128))):
        scales = (0.5 + torch.rand(size, device=device)) / inputs**0.5
        problems.append(ExpertsProblem(x, codes, scales, shape["x_bytes"] == 1, *pairs))
    return problems


def expert_shapes(which: str, capability: int) -> Iterator[Shape]:
    """`which`: tiny, small (some minutes) or all; the most important first."""
    if which == "tiny":
        for x_bytes, weight_bytes in _FORMS:
            if x_bytes > 1 or capability >= 89:
                yield _shape(x_bytes, weight_bytes, 40, 128, 160)
        return
    models = _MODELS[:2] if which == "small" else _MODELS
    for (x_bytes, weight_bytes), (outputs, inputs) in itertools.product(_FORMS, models):
        fewest, most = (
            (64, 1 << 30) if x_bytes == 1 else (1, linear.WEIGHT_ONLY_PAIRS if weight_bytes == 1 else 1 << 30)
        )
        if x_bytes == 1 and capability < 89:
            continue
        for tokens in (1, 16, 32, 64, 256):
            if fewest <= tokens <= most:
                yield _shape(x_bytes, weight_bytes, tokens, outputs, inputs)
    if which == "all":
        for entry in tuning.load_table("experts", tuning.table_architecture("experts", capability)):
            yield dict(entry.shape)


def _shape(x_bytes: int, weight_bytes: int, tokens: int, outputs: int, inputs: int) -> Shape:
    return {
        "x_bytes": x_bytes, "weight_bytes": weight_bytes, "tokens": tokens, "outputs": outputs, "inputs": inputs,
    }  # fmt: skip

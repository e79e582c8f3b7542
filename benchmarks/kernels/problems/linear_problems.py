"""Linear layers with int8 and fp8 weights on random buffers, to be timed; and the shapes that they are tuned for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.measure import Call, num_sets, relative_error
from pagewire.kernels import reference, tuning
from pagewire.kernels.triton.products import fp8_linear, int8_linear

Shape = Mapping[str, int]
Product = Callable[..., Tensor]

TOLERANCE = 1e-2
# (outputs, inputs) of Llama 3.1 8B: QKV, output, gate and up, down; of Qwen2.5 7B: gate and up, down.
_LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
_QWEN = ((37888, 3584), (3584, 18944))


@dataclass(frozen=True)
class LinearProblem:
    """One call per set of buffers."""

    product: Product
    inputs: list[tuple[Tensor, ...]]
    expected: Tensor  # of the first set

    def calls(self) -> list[Call]:
        return [partial(self.product, *buffers) for buffers in self.inputs]

    def is_right(self) -> bool:
        return relative_error(self.product(*self.inputs[0]), self.expected) <= TOLERANCE


def linear_problems(kernel: str, shape: Shape, device: torch.device) -> list[LinearProblem]:
    """`shape` has the keys of the kernel's table (`pagewire.kernels.tuning`)."""
    if kernel == "int8_product":
        return [_problem(_int8, reference.int8_linear, shape, torch.int8, False, device)]
    product = _fp8 if kernel == "fp8_product" else _weight_only
    expected = partial(reference.fp8_linear, quantize_input=kernel == "fp8_product")
    # Scales per output, and per block.
    return [_problem(product, expected, shape, torch.float8_e4m3fn, blocks, device) for blocks in (False, True)]


def linear_shapes(kernel: str, which: str, capability: int) -> Iterator[Shape]:
    """`which`: tiny, small (some minutes) or all; the most important first."""
    bounds = {"x_bytes": 2} if "x_bytes" in tuning.KERNELS[kernel].bounds else {}
    if which == "tiny":
        yield bounds | {"tokens": 4, "outputs": 40, "inputs": 2100}  # split, on a GPU
        return
    lengths = (1, 16, 64, 256, 2048) if which == "small" else (1, 4, 16, 32, 64, 128, 256, 512, 2048, 8192)
    for (outputs, inputs), tokens in itertools.product(_LLAMA if which == "small" else (*_LLAMA, *_QWEN), lengths):
        yield bounds | {"tokens": tokens, "outputs": outputs, "inputs": inputs}
    if which == "all":
        for entry in tuning.load_table(kernel, tuning.table_architecture(kernel, capability)):
            yield dict(entry.shape)


def _int8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return int8_linear.int8_linear(x, weight, scales, None, None, False)


def _fp8(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return fp8_linear.quantized_linear(x, weight, scales, None, None, False)


def _weight_only(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return fp8_linear.weight_only_linear(x, weight, scales, None, False)


def _problem(
    product: Product, reference: Product, shape: Shape, dtype: torch.dtype, blocks: bool, device: torch.device
) -> LinearProblem:
    half = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies no bf16
    x_dtype = torch.float32 if shape.get("x_bytes") == 4 else half
    tokens, outputs, inputs = (shape[key] for key in ("tokens", "outputs", "inputs"))

    def buffers() -> tuple[Tensor, ...]:
        numbers = torch.randn(outputs, inputs, device=device)
        weight = (numbers * 40).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else numbers.to(dtype)
        scales = torch.rand(-(-outputs // 128), -(-inputs // 128)) if blocks else torch.rand(outputs)
        return torch.randn(tokens, inputs, device=device).to(x_dtype), weight, scales.to(device)

    sets = [buffers() for _ in range(num_sets(outputs * inputs, device))]
    return LinearProblem(product, sets, reference(*sets[0], None, None))

"""Products of few rows on random buffers, to be timed beside what they replace; and the shapes they are tuned for.

The one that ends or begins a layer's half as it is, or with the stream's norm and SiLU: a table that says 1 for
library_rows or apart_rows measures cuBLAS, or norm, product and activation in three launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.measure import Call, num_sets, relative_error
from benchmarks.kernels.problems.grouped_problems import LLAMA, QWEN, random_weight
from pagewire.kernels import reference, tuning
from pagewire.kernels.triton.products import grouped_layout, linear, normed_linear
from pagewire.kernels.triton.products.skinny import MAX_ROWS, MAX_ROWS_APART

Shape = Mapping[str, int]

TOLERANCE = 1e-2
_EPS = 1e-5


@dataclass(frozen=True)
class SkinnyProblem:
    """One call per set of buffers."""

    products: Sequence[Callable[[], Tensor]]
    expected: Tensor  # of the first set

    def calls(self) -> list[Call]:
        return list(self.products)

    def is_right(self) -> bool:
        return relative_error(self.products[0](), self.expected) <= TOLERANCE


def skinny_problems(kernel: str, shape: Shape, device: torch.device) -> list[SkinnyProblem]:
    """`shape` has the keys of the kernel's table (`pagewire.kernels.tuning`)."""
    if kernel == "grouped_skinny":
        return [_grouped(shape, device)]
    return [_plain(shape, device), _normed(shape, device)]


def skinny_shapes(kernel: str, which: str, capability: int) -> Iterator[Shape]:
    """`which`: tiny, small (some minutes) or all; the most important first."""
    formats: tuple[dict[str, int], ...] = ({},)
    if kernel == "grouped_skinny":
        formats = ({"bits": 4, "group": 128},) if which != "all" else tuple(
            {"bits": bits, "group": group} for bits, group in ((4, 128), (4, 32), (8, 128), (8, 32))
        )  # fmt: skip
    if which == "tiny":
        yield {"tokens": 3, "outputs": 80, "inputs": 2100, **formats[0]}  # split, on a GPU
        return
    models = LLAMA if which == "small" else (*LLAMA, *QWEN, (1152, 896), (9728, 896), (896, 4864))
    num_tokens = (1, 4, MAX_ROWS) if kernel == "grouped_skinny" else (MAX_ROWS, 16, 32, MAX_ROWS_APART)
    for form, (outputs, inputs), tokens in itertools.product(formats, models, num_tokens):
        yield {"tokens": tokens, "outputs": outputs, "inputs": inputs, **form}
    if which == "all":
        for entry in tuning.load_table(kernel, tuning.table_architecture(kernel, capability)):
            yield dict(entry.shape)


def _plain(shape: Shape, device: torch.device) -> SkinnyProblem:
    sets = [_buffers(shape, device)[:2] for _ in range(_count(shape, 16, device))]
    first_x, first_weight = sets[0]
    products = [partial(linear.linear, x, weight, None) for x, weight in sets]
    return SkinnyProblem(products, reference.linear(first_x.float(), first_weight.float(), None))


def _normed(shape: Shape, device: torch.device) -> SkinnyProblem:
    """outputs of the shape: gates and ups."""
    sets = [_buffers(shape, device) for _ in range(_count(shape, 16, device))]
    x, weight, residual, updated, norm = sets[0]
    expected = reference.normed_linear(
        x.float(), residual.float(), updated.float(), norm.float(), _EPS, weight.float(), None, True
    )
    products = [
        partial(normed_linear.normed_linear, x, residual, updated, norm, _EPS, weight, None, True)
        for x, weight, residual, updated, norm in sets
    ]
    return SkinnyProblem(products, expected)


def _grouped(shape: Shape, device: torch.device) -> SkinnyProblem:
    """As `_normed`, of weights as `grouped_problems` has them."""
    products: list[Callable[[], Tensor]] = []
    expected = None
    for _ in range(_count(shape, shape["bits"], device)):
        x, _, residual, updated, norm = _buffers({**shape, "outputs": 1}, device)
        weight = random_weight(shape, device)
        if expected is None:
            expected = reference.normed_linear(
                x.float(), residual.float(), updated.float(), norm.float(), _EPS, weight.dequantize(), None, True
            )
        packed = grouped_layout.pack(weight)
        products.append(
            partial(
                normed_linear.normed_grouped_linear, x, residual, updated, norm, _EPS, packed.codes, packed.scales,
                packed.offsets, packed.codebook, packed.permutation, None, packed.shape[0], packed.bits,
                packed.group_size, packed.zero_point, True,
            )
        )  # fmt: skip
    assert expected is not None
    return SkinnyProblem(products, expected)


def _buffers(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x, weight, residual, updated, norm"""
    half = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies no bf16
    tokens, outputs, inputs = (shape[key] for key in ("tokens", "outputs", "inputs"))

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(half)

    weight = random(outputs, inputs) / inputs**0.5
    residual = random(tokens, inputs)
    return random(tokens, inputs), weight, residual, torch.empty_like(residual), random(inputs)


def _count(shape: Shape, bits: int, device: torch.device) -> int:
    return num_sets(shape["outputs"] * shape["inputs"] * bits // 8, device)

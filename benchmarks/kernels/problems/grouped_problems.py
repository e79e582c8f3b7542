"""Linear layers with grouped weights on random buffers, to be timed; and the shapes that they are tuned for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.measure import Call, num_sets, relative_error
from pagewire.kernels import reference, tuning
from pagewire.kernels.quantized.packed import PackedGrouped
from pagewire.kernels.quantized.weights import GroupedWeight
from pagewire.kernels.triton.products import grouped_layout, grouped_linear

Shape = Mapping[str, int]

TOLERANCE = 1e-2
# (outputs, inputs) of Llama 3.1 8B: QKV, output, gate and up, down; of Qwen2.5 7B: gate and up, down.
LLAMA = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
QWEN = ((37888, 3584), (3584, 18944))


@dataclass(frozen=True)
class GroupedProblem:
    """One call per set of buffers."""

    inputs: list[tuple[Tensor, PackedGrouped]]
    expected: Tensor  # of the first set

    def calls(self) -> list[Call]:
        return [partial(_multiply, *buffers) for buffers in self.inputs]

    def is_right(self) -> bool:
        return relative_error(_multiply(*self.inputs[0]), self.expected) <= TOLERANCE


def grouped_problems(shape: Shape, device: torch.device) -> list[GroupedProblem]:
    """`shape` has the keys of the kernels' tables (`kernels.tuning`). Weights with zero points, as AWQ's, or in groups
    of 32 with minimums, as Q4_1's."""
    half = torch.float16 if device.type == "cpu" else torch.bfloat16  # the interpreter multiplies no bf16

    def buffers() -> tuple[Tensor, GroupedWeight]:
        return torch.randn(shape["tokens"], shape["inputs"], device=device).to(half), random_weight(shape, device)

    bytes_per_set = shape["outputs"] * shape["inputs"] * shape["bits"] // 8
    sets = [buffers() for _ in range(num_sets(bytes_per_set, device))]
    expected = reference.grouped_linear(*sets[0], None)
    return [GroupedProblem([(x, grouped_layout.pack(weight)) for x, weight in sets], expected)]


def grouped_shapes(kernel: str, which: str, capability: int) -> Iterator[Shape]:
    """`which`: tiny, small (some minutes) or all; the most important first."""
    if which == "tiny":
        yield {"bits": 4, "tokens": 2, "group": 32, "outputs": 40, "inputs": 2100}  # split, on a GPU
        yield {"bits": 4, "tokens": 130, "group": 128, "outputs": 300, "inputs": 520}  # as wide products
        return
    lengths = (8, 16, 32, 64, 128, 512, 2048)
    formats = ((4, 128),) if which == "small" else ((4, 128), (4, 32), (8, 128), (8, 32), (8, 16))
    models = LLAMA if which == "small" else (*LLAMA, *QWEN)
    for (bits, group), (outputs, inputs), tokens in itertools.product(formats, models, lengths):
        yield {"bits": bits, "tokens": tokens, "group": group, "outputs": outputs, "inputs": inputs}
    if which == "all":
        for entry in tuning.load_table(kernel, tuning.table_architecture(kernel, capability)):
            yield dict(entry.shape)


def _multiply(x: Tensor, weight: PackedGrouped) -> Tensor:
    tensors = (weight.codes, weight.scales, weight.offsets, weight.codebook, weight.permutation)
    form = (weight.shape[0], weight.bits, weight.group_size, weight.zero_point)
    return grouped_linear.grouped_linear(x, *tensors, None, *form)


def random_weight(shape: Shape, device: torch.device) -> GroupedWeight:
    outputs, inputs, bits, group = (shape[key] for key in ("outputs", "inputs", "bits", "group"))
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, device=device)
    scales = (torch.rand(outputs, -(-inputs // group), device=device) * 0.01).half()
    if group == 32:
        return GroupedWeight(codes, bits, group, scales, offsets=-scales * 2 ** (bits - 1))
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, device=device)
    return GroupedWeight(codes, bits, group, scales, offsets=zeros)

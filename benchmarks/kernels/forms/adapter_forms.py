"""Every form in which the kernels of adapters are compiled for the models that we serve."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.kernels.compiler import Specialization
from pagewire.kernels.triton import adapters

# (parts, rank, inputs): projections of Llama 3.1 8B and of a small model, with ranks of one tile and of several
_SHAPES = ((3, 16, 4096), (1, 16, 4096), (2, 16, 4096), (1, 64, 14336), (3, 128, 4096), (3, 8, 576))


def adapter_forms() -> Iterator[Specialization]:
    for num_parts, rank, num_inputs in _SHAPES:
        for form in adapters.specializations("bf16", num_parts, rank, num_inputs):
            yield Specialization(*form)

"""The problems with which a kernel is measured for a shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from benchmarks.gpu.measure import Call
from benchmarks.kernels.problems.expert_problems import expert_problems
from benchmarks.kernels.problems.grouped_problems import grouped_problems
from benchmarks.kernels.problems.linear_problems import linear_problems
from benchmarks.kernels.problems.problems import attention_problem
from benchmarks.kernels.problems.skinny_problems import skinny_problems
from benchmarks.kernels.shapes import CONTEXTS, SKINNY, TINY_CONTEXT, Shape


class Problem(Protocol):
    """Something to compute on random buffers."""

    def calls(self) -> list[Call]:
        """One per set of buffers."""

    def is_right(self) -> bool:
        """Returns whether the first set's result is."""


def problems_of(kernel: str, shape: Shape, device: torch.device) -> Sequence[Problem]:
    """`shape` has the keys of the kernel's table (`pagewire.kernels.tuning`)."""
    if kernel in SKINNY:
        return skinny_problems(kernel, shape, device)
    if kernel.startswith("grouped_"):
        return grouped_problems(shape, device)
    if kernel == "experts":
        return expert_problems(shape, device)
    if kernel not in CONTEXTS:
        return linear_problems(kernel, shape, device)
    contexts = (TINY_CONTEXT,) if device.type == "cpu" else CONTEXTS[kernel](shape)
    return [attention_problem(shape, context_len, device) for context_len in contexts]

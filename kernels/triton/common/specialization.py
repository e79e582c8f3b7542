"""The record of what a Triton kernel is compiled for."""

from __future__ import annotations

from typing import Any, NamedTuple


class Specialization(NamedTuple):
    """What one kernel is compiled for: enough to compile it without a GPU, in the terms of triton's ASTSource."""

    kernel: Any  # the @triton.jit function
    types: dict[str, str]  # argument -> Triton type, in the kernel's order; "constexpr" for an absent pointer
    constants: dict[str, Any]  # constexpr -> value
    num_warps: int
    num_stages: int

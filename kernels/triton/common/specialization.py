"""The description of a compiled form of a Triton kernel."""

from __future__ import annotations

from typing import Any, NamedTuple


class Specialization(NamedTuple):
    """The form that a kernel is compiled in, in the terms of triton's ASTSource; enough to compile it without a GPU."""

    kernel: Any  # the @triton.jit function
    types: dict[str, str]  # argument -> Triton type, in the kernel's order; "constexpr" for an absent pointer
    constants: dict[str, Any]  # constexpr -> value
    num_warps: int
    num_stages: int

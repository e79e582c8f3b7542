"""Products of warp groups (wgmma, of sm_90): four warps multiply 64 rows or more, while they do other work."""

from __future__ import annotations

from typing import Any

from triton.language import core

_CAPABILITY, _WARPS, _ROWS = 90, 4, 64


def multiplies_by_warp_groups(rows: Any, _semantic: Any = None) -> Any:
    """Returns, in a kernel, whether Triton multiplies a matrix of 16 bits with so many rows by warp groups. To the
    interpreter, which has no `_semantic`, warps are nothing."""
    enough = getattr(rows, "value", rows) >= _ROWS
    if _semantic is not None:
        options = _semantic.builder.options
        enough = enough and int(options.arch.removeprefix("sm")) == _CAPABILITY and options.num_warps % _WARPS == 0
    return core.constexpr(enough)


# What marks a function that the compiler calls, as those of triton.language are.
multiplies_by_warp_groups.__triton_builtin__ = True  # type: ignore[attr-defined]

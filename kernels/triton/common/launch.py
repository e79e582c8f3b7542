"""Programmatic dependent launch: a kernel begins while the one before it ends, and waits inside for what that writes.

A launch costs a GPU some microseconds in which nothing is read: the last programs of a kernel end, then those of the
next one are set up. On compute capability 9.0 and above the next one is set up meanwhile, if both agree to it:

- `**dependent_launch(device)` among the launch's options lets a kernel begin early. CUDA graphs record it.
- `wait_for_inputs()` in its body returns when all kernels before it have ended and what they wrote can be seen.
- `launch_dependents()`, behind it, lets the kernel after it begin as soon as all programs here have begun.

Three rules keep it right:

- Every program waits, on every path that it can take, also where it finds nothing to do. A kernel that ended without
  having waited could end before the one before it, and the next one, which waits for it alone, would begin too early.
- Before it waits, it only reads what no step writes (weights), and what `settle` came behind, past the L1 cache: with
  `load_four` or ".cg". It writes nothing, as earlier kernels may still read, and counts nothing.
- `launch_dependents()` comes behind the wait. So no more than two kernels are under way at once, and memory that torch
  uses again for the next result but one is free.

Kernels without any of this (cuBLAS, copies) begin when all before them have ended, as ever. Elsewhere than on such GPUs
the calls are nothing at all. Weights are replaced by copies, behind which no kernel begins early.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

import triton
from triton.language import core
from triton.language.extra import cuda

_CAPABILITY = 90
_EARLY: Mapping[str, Any] = MappingProxyType({"launch_pdl": True})
_IN_TURN: Mapping[str, Any] = MappingProxyType({})

# To measure what it is worth; graphs keep what they were recorded with.
enabled = True


def dependent_launch(device: torch.device) -> Mapping[str, Any]:
    """Options of a kernel that waits for its inputs by itself."""
    return _EARLY if enabled and _launches_early(device) else _IN_TURN


@cache
def _launches_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] * 10 >= _CAPABILITY


def wait_for_inputs(_semantic: Any = None) -> None:
    """Waits, in a kernel, until everything that was launched before has ended and is visible."""
    if _has_instructions(_semantic):
        cuda.gdc_wait(_semantic=_semantic)


def launch_dependents(_semantic: Any = None) -> None:
    """Lets the next kernel begin once all programs of this one have come here, or ended."""
    if _has_instructions(_semantic):
        cuda.gdc_launch_dependents(_semantic=_semantic)


def load_four(pointer: Any, _semantic: Any = None) -> Any:
    """Loads, in a kernel, the four int32 at `pointer`, a multiple of 16 bytes, at once from the L2 cache."""
    if _semantic is None:
        return tuple(core.load(pointer + index) for index in range(4))
    return core.inline_asm_elementwise(
        "ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [pointer], dtype=(core.int32,) * 4,
        is_pure=False, pack=1, _semantic=_semantic,
    )  # fmt: skip


def prefetch(pointers: Any, _semantic: Any = None) -> None:
    """Prefetches, in a kernel before it waits, the lines of 128 bytes at `pointers` to the L2 cache."""
    if _has_instructions(_semantic):
        core.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [pointers], dtype=core.int32, is_pure=False, pack=1,
            _semantic=_semantic,
        )  # fmt: skip


def _has_instructions(semantic: Any) -> bool:
    """By what is compiled for, which need not be the machine's own GPU. The interpreter has no `semantic`."""
    return semantic is not None and int(semantic.builder.options.arch.removeprefix("sm")) >= _CAPABILITY


# What marks a function that the compiler calls, as those of triton.language are.
for _name in ("wait_for_inputs", "launch_dependents", "load_four", "prefetch"):
    globals()[_name].__triton_builtin__ = True


@triton.jit
def settled_kernel():
    wait_for_inputs()
    launch_dependents()


def settle(device: torch.device) -> None:
    """Ends the early launches after a kernel with results that others may then read before they wait.

    Without this the next kernel could be the first to wait for it, and would read before that. Behind this one, all
    begin when it has waited.
    """
    options = dependent_launch(device)
    if options:
        settled_kernel[(1,)](num_warps=1, **options)

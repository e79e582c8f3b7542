"""The CPU ops in C++ (compiled on first use), in plain torch (slower), or in Triton's interpreter (for tests)."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

from pagewire.kernels.cpu.build import BuildError
from pagewire.kernels.ops import DEFINITIONS

__all__ = ["backend", "choose", "implementation"]

logger = logging.getLogger(__name__)


def choose() -> str:
    """What PAGEWIRE_CPU_KERNELS asks for: "cpp" (the default), "torch" or "triton".

    Where the C++ kernels cannot be had it is "torch" instead, and the log says why. "triton" runs the CUDA kernels on
    the CPU, extremely slowly, to test the executor with them; it needs TRITON_INTERPRET=1 from the start
    of the process, and a model in fp32 or fp16 (the interpreter multiplies bf16 wrongly). Raises ValueError for
    anything else.
    """
    choice = os.environ.get("PAGEWIRE_CPU_KERNELS") or "cpp"  # empty is unset, as with all our variables
    if choice == "torch":
        logger.warning("CPU kernels: plain torch, as PAGEWIRE_CPU_KERNELS asks (several times slower than C++)")
    elif choice == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("PAGEWIRE_CPU_KERNELS='triton' runs in Triton's interpreter only: set TRITON_INTERPRET=1")
        logger.warning("CPU kernels: Triton's interpreter, as PAGEWIRE_CPU_KERNELS asks (for tests: extremely slow)")
    elif choice == "cpp":
        try:
            importlib.import_module("pagewire.kernels.cpu.native")
        except BuildError as error:
            logger.warning("CPU kernels: plain torch, several times slower than the C++ ones: %s", error)
            return "torch"
    else:
        raise ValueError(f'PAGEWIRE_CPU_KERNELS={choice!r} is unknown: use "cpp", "torch" or "triton"')
    return choice


backend = functools.cache(choose)


def implementation(name: str) -> Callable[..., Any]:
    """The CPU implementation of the op `name`."""
    cuda = DEFINITIONS[name].cuda
    triton = "cpu.fallback" if cuda is None else f"triton.{cuda}"
    module = {"cpp": "cpu.native", "torch": "cpu.fallback", "triton": triton}[backend()]
    return getattr(importlib.import_module(f"pagewire.kernels.{module}"), name)

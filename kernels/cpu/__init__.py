"""CPU implementations: `native` (C++, compiled on first use) or `fallback` (plain torch, slower)."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kernels.cpu import fallback
from kernels.cpu.build import BuildError

__all__ = ["backend", "choose", "implementation"]

logger = logging.getLogger(__name__)


def choose() -> ModuleType:
    """`native`, or `fallback` where the C++ kernels cannot be had or PAGEWIRE_CPU_KERNELS=torch; logs the latter."""
    choice = os.environ.get("PAGEWIRE_CPU_KERNELS", "cpp")
    if choice not in ("cpp", "torch"):
        raise ValueError(f'PAGEWIRE_CPU_KERNELS={choice!r} is unknown: use "cpp" or "torch"')
    if choice == "torch":
        logger.warning("CPU kernels: plain torch, as PAGEWIRE_CPU_KERNELS asks (several times slower than C++)")
        return fallback
    try:
        from kernels.cpu import native
    except BuildError as error:
        logger.warning("CPU kernels: plain torch, several times slower than the C++ ones: %s", error)
        return fallback
    return native


_module = functools.cache(choose)


def backend() -> str:
    """ "cpp" or "torch"."""
    return "torch" if _module() is fallback else "cpp"


def implementation(name: str) -> Callable[..., Any]:
    """The CPU implementation of the op `name`."""
    return getattr(_module(), name)

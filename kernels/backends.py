"""Implementations of ops, found by name: `pagewire.kernels.<folder>.<group>.<op>`.

An op that is defined in `pagewire.kernels.ops.<group>` is implemented by the function of its name in the group of the
same name elsewhere: a module, or a folder with a module that defines it. Each backend has a list of folders that are
searched in order; so the reference is used if there is no faster implementation.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["FOLDERS", "SLOWDOWN", "BuildError", "choose", "chosen", "cpu_backend", "find"]

FOLDERS = {
    "cuda": ("triton",),
    "cpp": ("cpu", "fallback", "reference"),
    "torch": ("fallback", "reference"),
    "triton": ("triton", "fallback", "reference"),  # on a CPU, in Triton's interpreter
}

# Measured with the built-in model.
SLOWDOWN = "5 to 15 times slower than C++"

_INSTALL = "install g++ 12 or newer (apt install g++, dnf install gcc-c++), or set CXX to one"

logger = logging.getLogger(__name__)


class BuildError(RuntimeError):
    """The C++ kernels cannot be compiled or loaded here."""

    def __init__(self, cause: str, remedy: str = _INSTALL) -> None:
        super().__init__(f"{cause}; {remedy}")
        self.cause, self.remedy = cause, remedy


def cpu_backend() -> str:
    """Returns the backend of the CPU's ops: "cpp"; "torch" if there are none and none can be compiled (slower;
    logged once); or "triton" on request: the CUDA kernels in Triton's interpreter."""
    return chosen()


def choose() -> str:
    """Returns the choice of PAGEWIRE_CPU_KERNELS: "cpp" (the default), "torch" or "triton".

    If there are no C++ kernels and none can be compiled, it is "torch" instead, and the log gives the reason. "triton"
    runs the CUDA kernels on the CPU, extremely slowly, to test the executor with them; it needs TRITON_INTERPRET=1 from
    the start of the process, and a model in fp32 or fp16 (the interpreter multiplies bf16 wrongly). Raises ValueError
    for anything else.
    """
    choice = os.environ.get("PAGEWIRE_CPU_KERNELS") or "cpp"  # empty means unset, as for all our variables
    if choice == "torch":
        logger.warning("CPU kernels: plain torch, %s (PAGEWIRE_CPU_KERNELS=torch)", SLOWDOWN)
    elif choice == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("PAGEWIRE_CPU_KERNELS='triton' runs in Triton's interpreter only: set TRITON_INTERPRET=1")
        logger.warning("CPU kernels: Triton's interpreter, extremely slow, for tests (PAGEWIRE_CPU_KERNELS=triton)")
    elif choice == "cpp":
        try:
            importlib.import_module("pagewire.kernels.cpu.runtime.library")
        except BuildError as error:
            logger.warning("CPU kernels: plain torch, %s: %s", SLOWDOWN, error)
            return "torch"
    else:
        raise ValueError(f'PAGEWIRE_CPU_KERNELS={choice!r} is unknown: use "cpp", "torch" or "triton"')
    return choice


chosen = functools.cache(choose)


@functools.cache
def find(backend: str, group: str, op: str) -> Callable[..., Any]:
    """Returns the implementation of an op for a backend, a key of FOLDERS. Raises NotImplementedError."""
    for folder in FOLDERS[backend]:
        for module in _modules(folder, group):
            function = vars(module).get(op)
            # A module that only imports the function is skipped.
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                return function
    raise NotImplementedError(
        f"the op {op!r} has no implementation for {backend!r}: define {op}() in kernels/{FOLDERS[backend][-1]}/{group}"
    )


@functools.cache
def _modules(folder: str, group: str) -> tuple[ModuleType, ...]:
    """Yields the module `kernels.<folder>.<group>`, or the modules of the folder with this name, if there is either."""
    name = f"pagewire.kernels.{folder}.{group}"
    if importlib.util.find_spec(name) is None:
        return ()
    module = importlib.import_module(name)
    if not hasattr(module, "__path__"):
        return (module,)
    return tuple(importlib.import_module(f"{name}.{found.name}") for found in pkgutil.iter_modules(module.__path__))

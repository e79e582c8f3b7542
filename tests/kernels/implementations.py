"""The implementations of ops by backend: `native.linear`, `fallback.linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagewire.kernels.ops.definition import DEFINITIONS, implementation


class Implementations:
    """The ops of one backend (`pagewire.kernels.backends.FOLDERS`), as attributes."""

    def __init__(self, backend: str) -> None:
        self.__name__ = backend

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op not in DEFINITIONS:
            raise AttributeError(op)
        return implementation(op, self.__name__)


# Type checkers know no attributes of these, as of modules that are parameters.
native: Any = Implementations("cpp")
fallback: Any = Implementations("torch")

"""The definition of an op: a typed function that determines its schema, the shape of its result and its callable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from pagewire.kernels import backends

__all__ = ["DEFINITIONS", "Definition", "implementation", "op"]


@dataclass(frozen=True)
class Definition:
    """One op; its name is the function's."""

    function: Callable[..., Any]  # the signature that all implementations share
    cuda: bool  # False: for CPUs alone

    @property
    def group(self) -> str:
        """The name of the module that defines the op, and of each module that implements it."""
        return self.function.__module__.rpartition(".")[2]


DEFINITIONS: dict[str, Definition] = {}  # by name

_library = torch.library.Library("pagewire", "DEF")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def op(*, mutates: tuple[str, ...] = (), cuda: bool = True) -> Callable[[_Function], _Function]:
    """Registers the decorated function as `torch.ops.pagewire.<its name>` and returns the op's overload, which is
    called past torch's overload resolution.

    The signature becomes the schema, the body the fake implementation: it returns a tensor of the result's shape and
    dtype, without data. Implementations are found by name (`kernels.backends`) and load on first use. `mutates` names
    the arguments that the op writes to; an op without `cuda` is for CPUs alone. No parameter has a default: torch would
    not hand on an argument that equals it.
    """

    def define(function: _Function) -> _Function:
        name = function.__name__
        DEFINITIONS[name] = Definition(function, cuda)
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, _on_first_call(partial(_cpu, name)), "CPU")
        if cuda:
            _library.impl(name, _on_first_call(partial(_cuda, name)), "CUDA")
        torch.library.register_fake(f"pagewire::{name}", function, lib=_library)
        overload: _Function = getattr(torch.ops.pagewire, name).default
        return overload

    return define


def _on_first_call(resolve: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a function that finds its implementation when it is first called."""
    implementation: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal implementation
        if implementation is None:
            implementation = resolve()
        return implementation(*args)

    return call


def implementation(name: str, backend: str | None = None) -> Callable[..., Any]:
    """Returns the function that computes an op for a backend (`backends.FOLDERS`); without one, on this CPU."""
    return backends.find(backend or backends.cpu_backend(), DEFINITIONS[name].group, name)


def _cpu(name: str) -> Callable[..., Any]:
    return implementation(name)


def _cuda(name: str) -> Callable[..., Any]:
    return implementation(name, "cuda")

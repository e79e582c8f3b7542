"""How an op is defined: one typed function, from which follow its schema, its result's shape and what callers call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

__all__ = ["DEFINITIONS", "Definition", "op"]


@dataclass(frozen=True)
class Definition:
    """One op; its name is the function's."""

    function: Callable[..., Any]  # the signature that all implementations share
    cuda: str | None  # module in kernels.triton with the CUDA implementation; None: for CPUs alone


DEFINITIONS: dict[str, Definition] = {}  # by name

_library = torch.library.Library("pagewire", "DEF")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def op(*, cuda: str | None, mutates: tuple[str, ...] = ()) -> Callable[[_Function], _Function]:
    """Registers the decorated function as `torch.ops.pagewire.<its name>` and returns the op's overload, which is
    called past torch's overload resolution.

    The signature becomes the schema, the body the fake implementation: it returns a tensor of the result's shape and
    dtype, without data. An implementation is the function of the same name in a module that loads on first use:
    kernels.triton.<cuda> on CUDA, what `pagewire.kernels.cpu` chooses on a CPU. `mutates` names the arguments that the
    op writes to. No parameter has a default: torch would not hand on an argument that equals it.
    """

    def define(function: _Function) -> _Function:
        name = function.__name__
        DEFINITIONS[name] = Definition(function, cuda)
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _library.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, _on_first_call(partial(_cpu, name)), "CPU")
        if cuda is not None:
            _library.impl(name, _on_first_call(partial(_cuda, name, cuda)), "CUDA")
        torch.library.register_fake(f"pagewire::{name}", function, lib=_library)
        overload: _Function = getattr(torch.ops.pagewire, name).default
        return overload

    return define


def _on_first_call(resolve: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A function that finds its implementation when it is first called."""
    implementation: Callable[..., Any] | None = None

    def call(*args: Any) -> Any:
        nonlocal implementation
        if implementation is None:
            implementation = resolve()
        return implementation(*args)

    return call


def _cpu(name: str) -> Callable[..., Any]:
    from pagewire.kernels import cpu

    return cpu.implementation(name)


def _cuda(name: str, module: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"pagewire.kernels.triton.{module}"), name)

"""Pairs the tensors of two models of the same structure, so that the values of one can replace the other's.

Recorded steps and CUDA graphs hold the addresses of a model's tensors. So new weights are written over the old ones,
and everything except the tensors' values must be the same.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pagewire.services.executor.layers.weights import LayerAdapters
from pagewire.services.executor.parallel.communicator import Communicator

# (tensor of the model in use, tensor of the other)
Pairs = list[tuple[Tensor, Tensor]]

_NO_STATE = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, PurePath)
_VALUES = (bool, int, float, complex, str, bytes, type(None), enum.Enum, set, frozenset, torch.dtype, torch.device)


class Differs(Exception):
    """The models have different structures; the message says where."""


def twins(old: Any, new: Any, name: str = "model") -> Pairs:
    """Returns each tensor of `old` with its twin of `new`. Skips tensors that only `old` has: those that a model gets
    when in use, such as its KV cache. name: the models' name for the error.

    Raises Differs.
    """
    walk = _Walk()
    walk.visit(name, old, new)
    return walk.pairs


class _Walk:
    def __init__(self) -> None:
        self.pairs: Pairs = []
        self._seen: set[tuple[int, int]] = set()

    def visit(self, path: str, old: Any, new: Any) -> None:
        if isinstance(new, (*_NO_STATE, Communicator)) or isinstance(old, LayerAdapters) or _is_config(new):
            return
        if type(old) is not type(new):
            raise Differs(f"{path} is {_said(new)}, where it is {_said(old)} in the model that is served")
        if isinstance(new, Tensor):
            self._pair(path, old, new)
        elif isinstance(new, np.ndarray):
            if not np.array_equal(old, new):
                raise Differs(f"{path} has other values than in the model that is served")
        elif isinstance(new, _VALUES):
            if old != new:
                raise Differs(f"{path} is {_said(new)}, where it is {_said(old)} in the model that is served")
        elif (id(old), id(new)) not in self._seen:
            self._seen.add((id(old), id(new)))
            self._visit_parts(path, old, new)

    def _visit_parts(self, path: str, old: Any, new: Any) -> None:
        old_parts, new_parts = dict(_parts(old)), dict(_parts(new))
        is_whole = isinstance(new, Mapping | list | tuple | nn.Module)
        missing = (old_parts.keys() ^ new_parts.keys()) if is_whole else new_parts.keys() - old_parts.keys()
        if missing:
            raise Differs(f"{path} is made of other parts than in the model that is served: {sorted(missing)[0]}")
        for part, value in new_parts.items():
            self.visit(path + part, old_parts[part], value)

    def _pair(self, path: str, old: Tensor, new: Tensor) -> None:
        for what in ("shape", "dtype", "device"):
            of_old, of_new = getattr(old, what), getattr(new, what)
            if of_old != of_new:
                raise Differs(f"{path} has {what} {_said(of_new)}, where the model that is served has {_said(of_old)}")
        self.pairs.append((old, new))


def _is_config(value: Any) -> bool:
    """Returns whether to skip a value: transformers' configs state their origin; `ModelConfig` has the rest."""
    return type(value).__module__.startswith("transformers.") and not isinstance(value, nn.Module)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the notation of each part behind its owner's name, and the part."""
    if isinstance(value, nn.Module):  # transformers': except for tensors, much of it only states its origin
        yield from ((f".{name}", tensor) for name, tensor in value.named_parameters())
        yield from ((f".{name}", tensor) for name, tensor in value.named_buffers())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((".args", value.args), (".keywords", value.keywords))
    else:
        names = [name for cls in type(value).__mro__ for name in _slots(cls)]
        names += vars(value) if hasattr(value, "__dict__") else []
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _said(value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(list(value))
    if isinstance(value, _VALUES):
        text = str(value).removeprefix("torch.")
        return text if len(text) <= 80 else f"{text[:77]}..."
    return f"a {type(value).__name__}"

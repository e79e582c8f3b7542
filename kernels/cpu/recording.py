"""Records steps of a model while they run, and replays them without Python: the CPU's counterpart of CUDA graphs.

A step of a small model is some two hundred kernels of a few microseconds each; finding each one through torch's
dispatcher and checking its arguments takes as long as computing. `record` runs a function once and records the calls
that the ops make into the C++ library, with their arguments. `Recorded.replay` makes the same calls again, from C++
and with the same addresses, so everything they read and write must be in memory that stays, and lengths must be read
from tensors. Operations of torch in between are recorded too, as calls from Python.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pagewire.kernels.cpu.runtime import library
from pagewire.kernels.ops.definition import implementation

__all__ = ["Memory", "NotRecorded", "Recorded", "Replay", "record"]

# Ops that partly use numpy: called from Python as a whole.
_OPAQUE = frozenset({"apply_penalties", "token_logprobs"})

_aten = torch.ops.aten
# Checks of arguments, which replays skip: token ids are checked when a request enters (`RequestState`), or they were
# sampled.
_CHECKS = frozenset({_aten.aminmax.default, _aten.item.default, _aten._local_scalar_dense.default})
_ALLOCATIONS = frozenset({_aten.empty.memory_format, _aten.empty_like.default, _aten.empty_strided.default})

_replay = library.bind("replay", library.P, library.L)
_zero = library.bind("zero", library.P, library.L)


class Recorded:
    """A function's calls. `output` is what it returned; every replay overwrites it."""

    def __init__(self, output: Tensor, parts: list[_NativeCalls | Callable[[], None]], memory: Memory) -> None:
        self.output = output
        self._memory = memory  # the calls have its addresses
        self._parts = [Replay(part) if isinstance(part, _NativeCalls) else part for part in parts]

    def replay(self) -> None:
        for part in self._parts:
            part()

    @property
    def native(self) -> list[Replay]:
        """Consecutive calls into the library, which need no Python."""
        return [part for part in self._parts if isinstance(part, Replay)]


class _NativeCalls:
    """Consecutive calls into the library that are being recorded."""

    def __init__(self) -> None:
        self.functions: list[int] = []
        self.slots = bytearray()
        self.offsets: list[int] = []

    def add(self, function: int, layout: str, arguments: tuple[Any, ...]) -> None:
        self.functions.append(function)
        self.offsets.append(len(self.slots))
        self.slots += struct.pack(layout, *(0 if value is None else value for value in arguments))


class Replay:
    """Makes calls into the library. `functions`: their addresses, see `library.address`."""

    def __init__(self, calls: _NativeCalls) -> None:
        self.functions = np.array(calls.functions, dtype=np.uint64)
        self._slots = np.frombuffer(calls.slots, dtype=np.uint8)  # the calls have its addresses
        slots = np.array(calls.offsets, dtype=np.uint64) + np.uint64(self._slots.ctypes.data)
        self._calls = np.stack([self.functions, slots], axis=1)

    def __call__(self) -> None:
        _replay(self._calls.ctypes.data, len(self._calls))

    def make(self, index: int) -> None:
        """A single call."""
        _replay(self._calls[index].ctypes.data, 1)


class Memory:
    """Memory for intermediate results of recorded steps; released memory is reused.

    Recorded steps never run at the same time, so their intermediate results may share memory.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}  # by size, a power of two
        self._buffers: dict[int, np.ndarray] = {}  # all of them, by address

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Contiguous."""
        size = max(64, 1 << (tensor.nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else np.empty(size, dtype=np.uint8)
        self._buffers[buffer.ctypes.data] = buffer
        view = buffer[: tensor.nbytes]  # lives as long as a tensor on its memory
        weakref.finalize(view, free.append, buffer)
        return torch.from_numpy(view).view(tensor.dtype).view(tensor.shape)

    def borrowed(self, leaf: Any) -> Any:
        """Returns a tensor on this memory as one that does not prevent its reuse; other values as they are."""
        buffer = self._buffers.get(_storage(leaf)) if isinstance(leaf, Tensor) else None
        if buffer is None:
            return leaf
        return torch.from_numpy(buffer).view(leaf.dtype).as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())


class NotRecorded(Exception):
    """The function ran, but its work depends on values that Python read: it must run again each time."""

    def __init__(self, output: Tensor, reason: str) -> None:
        super().__init__(reason)
        self.output, self.reason = output, reason


def record(function: Callable[[], Tensor], memory: Memory) -> Recorded:
    """Runs the function and records its work. Intermediate results come from `memory`.

    Raises NotRecorded, which has the function's result.
    """
    recorder = _Recorder(memory)
    with recorder:
        output = function()
    if recorder.obstacle is not None:
        raise NotRecorded(output, recorder.obstacle)
    return Recorded(output, recorder.parts, memory)


class _Recorder(TorchDispatchMode):
    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.parts: list[_NativeCalls | Callable[[], None]] = []
        self.obstacle: str | None = None
        self._memory = memory
        self._in_op = False

    def _dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "pagewire" and func._opname not in _OPAQUE:
            return self._run_op(func._opname, args)
        result = func(*args, **kwargs)
        if func in _CHECKS and self._in_op:
            return result
        if func in _ALLOCATIONS:
            return self._memory.empty_like(result) if result.numel() and result.is_contiguous() else result
        if func is _aten.zeros_like.default and result.numel() and result.is_contiguous():
            return self._zeros_like(result)
        results = [leaf for leaf in tree_leaves(result) if leaf is not None]
        if not all(isinstance(leaf, Tensor) for leaf in results):
            self.obstacle = f"{func} returns a number to Python"
            return result
        if _has_shape_of_values(func, args):
            self.obstacle = f"{func} has a result of a shape that depends on values"
            return result
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [_storage(leaf) not in known for leaf in results]
        # A part reads and writes at its place in the order, like calls into the library: later ones may reuse memory.
        args, kwargs = tree_map(self._memory.borrowed, (args, kwargs))
        if any(fresh):
            if isinstance(result, Tensor) and result.numel() and result.is_contiguous():
                result = self._memory.empty_like(result).copy_(result)
            target = tree_map(self._memory.borrowed, result)
            self.parts.append(lambda: _copy(func(*args, **kwargs), target))
        elif func._schema.is_mutable:
            self.parts.append(lambda: func(*args, **kwargs))
        return result

    def _zeros_like(self, tensor: Tensor) -> Tensor:
        zeros = self._memory.empty_like(tensor)
        with library.recorded_by(self):
            _zero(zeros.data_ptr(), zeros.nbytes)
        return zeros

    def _run_op(self, name: str, args: tuple[Any, ...]) -> Any:
        """Records its calls into the library; its torch operations return to this mode."""
        self._in_op = True
        try:
            with self, library.recorded_by(self):
                return implementation(name)(*args)
        finally:
            self._in_op = False

    def on_python(self, function: Callable[..., None], tensors: tuple[Tensor | None, ...]) -> None:
        self.parts.append(partial(function, *map(self._memory.borrowed, tensors)))

    def on_call(self, function: int, layout: str, arguments: tuple[Any, ...]) -> None:
        last = self.parts[-1] if self.parts else None
        if not isinstance(last, _NativeCalls):
            last = _NativeCalls()
            self.parts.append(last)
        last.add(function, layout, arguments)


# Not in the class's body, where torch's wrapper would import its compiler: 1.5 s and 150 MB.
_Recorder.__torch_dispatch__ = _Recorder._dispatch  # type: ignore[method-assign, assignment]


def _has_shape_of_values(func: Any, args: tuple[Any, ...]) -> bool:
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is _aten.index.Tensor:  # only where masks select
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return True


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(source: Any, target: Any) -> None:
    for new, old in zip(tree_leaves(source), tree_leaves(target), strict=True):
        if old is not None:
            old.copy_(new)

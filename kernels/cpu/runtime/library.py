"""The compiled library, and helpers for calls into it.

Importing this module compiles the library if necessary and raises BuildError if that is impossible. Calls go through
ctypes, which releases the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_void_p, cast
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from pagewire.kernels.cpu.runtime.build import load_library

# Argument types: pointer or None, int, int64, float
P, I, L, F = c_void_p, c_int, c_int64, c_float  # noqa: E741

# Dtype codes, as in vector.h
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT8, INT8 = 3, 4  # of KV caches only

# Elements below which an elementwise op runs on the calling thread alone.
_SERIAL_ELEMENTS = 32_768

_library = load_library()


class Recorder(Protocol):
    """The interface for recording calls, in order."""

    def on_call(self, function: int, layout: str, arguments: tuple[Any, ...]) -> None:
        """Records a call. function: the address of what makes the call again (replay.h), after its arguments have
        become slots, as struct.pack does it with the layout."""

    def on_python(self, function: Callable[..., None], tensors: tuple[Tensor | None, ...]) -> None:
        """Records a call of a Python function with tensors that it does not refer to itself."""


class _OfThread(threading.local):
    recorder: Recorder | None = None


# Per thread: other threads' calls do not belong to the recorded step; they may load weights meanwhile.
_of_thread = _OfThread()


def bind(name: str, *argument_types: Any) -> Callable[..., None]:
    """Returns the library's function pagewire_<name>; its calls are recorded."""
    function = getattr(_library, f"pagewire_{name}")
    function.argtypes = argument_types
    function.restype = None
    layout = "<" + "".join("f4x" if kind is F else "q" for kind in argument_types)

    def call(*arguments: Any) -> None:
        function(*arguments)
        if (recorder := _of_thread.recorder) is not None:
            recorder.on_call(address(name), layout, arguments)

    return call


@cache
def address(name: str) -> int:
    """Returns the address of the function that calls pagewire_<name> with recorded arguments."""
    result = cast(getattr(_library, f"pagewire_{name}_again"), c_void_p).value
    assert result is not None
    return result


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """Records every call of this thread with `recorder`."""
    before, _of_thread.recorder = _of_thread.recorder, recorder
    try:
        yield
    finally:
        _of_thread.recorder = before


def from_python(function: Callable[..., None], *tensors: Tensor | None) -> None:
    """Runs function(*tensors), here and in every replay; the calls that it makes are not recorded."""
    with recorded_by(None):
        function(*tensors)
    if (recorder := _of_thread.recorder) is not None:
        recorder.on_python(function, tensors)


def dtype_code(x: Tensor) -> int:
    code = _DTYPES.get(x.dtype)
    if code is None:
        raise TypeError(f"CPU kernels take float32, bfloat16 or float16, not {x.dtype}")
    return code


def result_dtype(op: str, x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a result: x's where none is given; raises TypeError unless it is x's or fp32."""
    if dtype is None or dtype is x.dtype:
        return x.dtype
    if dtype is not torch.float32:
        raise TypeError(f"{op}: the result must be {x.dtype} as x, or torch.float32, not {dtype}")
    return dtype


def narrowed_dtype(op: str, x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a result: x's where none is given; raises TypeError unless x has it, or is fp32."""
    if dtype is None or dtype is x.dtype:
        return x.dtype
    if x.dtype is not torch.float32:
        raise TypeError(f"{op}: x must be {dtype} as the result, or torch.float32, not {x.dtype}")
    return dtype


def threads_for(elements: int) -> int:
    return 1 if elements < _SERIAL_ELEMENTS else torch.get_num_threads()


def norm_weight(weight: Tensor, size: int, *dtypes: torch.dtype) -> int:
    """Returns the address of a norm's weight [size], of one of the dtypes."""
    if weight.dtype not in dtypes or weight.shape != (size,) or not weight.is_contiguous():
        expected = " or ".join(map(str, dict.fromkeys(dtypes)))
        raise ValueError(
            f"a norm's weight must be contiguous {expected} [{size}], not {weight.dtype} {tuple(weight.shape)}"
        )
    return weight.data_ptr()


def check_dtype(op: str, dtype: torch.dtype, *tensors: Tensor) -> None:
    """Raises TypeError for tensors of another dtype, or with rows that are not contiguous."""
    for x in tensors:
        if x.dtype is not dtype or x.stride()[-1] != 1:  # quicker than stride(-1)
            raise TypeError(f"{op}: must be {dtype} in contiguous rows, not {x.dtype} {tuple(x.shape)}")


def check_rows(op: str, ids: Tensor, num_rows: int) -> None:
    """Raises IndexError for ids beyond a table. Recorded steps skip it (`recording`)."""
    if ids.numel() > 0:
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= num_rows:
            raise IndexError(f"{op}: ids from {low} to {high} are not rows of a table of {num_rows}")

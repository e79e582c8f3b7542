"""Memory that the host may not look at, as a GPU's, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewire.services.executor.device import memory

_WAITING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Watch(TorchDispatchMode):
    """Refuses what would wait for a GPU: numbers and shapes that depend on what tensors hold. Kernels see all."""

    in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.index_put):
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        else:
            waits = bool(_WAITING_TAGS & set(func.tags)) or func.overloadpacket == torch.ops.aten.is_nonzero
        assert not waits, f"{func} would wait for the device"
        outer, self.in_kernel = self.in_kernel, True
        try:
            return func(*args, **kwargs or {})
        finally:
            self.in_kernel = outer


@contextmanager
def unread() -> Iterator[None]:
    """No tensor is read here."""
    watch = _Watch()

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert watch.in_kernel, f"{method.__name__}() would wait for the device"
            return method(tensor, *args, **kwargs)

        return read

    with ExitStack() as patches:
        for name in ("numpy", "tolist", "cpu", "__array__"):
            patches.enter_context(mock.patch.object(Tensor, name, refusing(getattr(Tensor, name))))
        with watch:
            yield


@contextmanager
def far_memory() -> Iterator[None]:
    """Our own code takes a CPU's memory for a GPU's, which `unread` then proves."""
    with mock.patch.object(memory, "is_shared", lambda device: False):
        yield

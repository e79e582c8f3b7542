"""Ranks with a GPU each (NCCL), or on several machines' CPUs (gloo): a communicator through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pagewire.kernels.ops import cpu_backend

# The same, by its name in torch 2.13 and before that.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchCommunicator:
    """A `Communicator`. Sums are in an order that depends on the library, but not on time, and every rank is given the
    same bits: rings, by which both add, compute each part of a sum once.

    On CUDA calls only launch, on the current stream, and may be captured in a graph once one has run outside of it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        _run(lambda x: dist.all_reduce(x, group=self._group), x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, columns = x.shape
        parts = torch.empty((self.size * rows, columns), dtype=x.dtype, device=x.device)
        _run(lambda parts, x: _all_gather(parts, x, group=self._group), parts, x)
        return parts.view(self.size, rows, columns).transpose(0, 1).reshape(rows, self.size * columns)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        x = x.contiguous()
        _run(lambda x: dist.broadcast(x, group=self._group, group_src=root), x)
        return x


def _run(collective: Callable[..., object], *tensors: Tensor) -> None:
    """In recorded steps of a CPU it is a call from Python: recorders know nothing of process groups."""
    if tensors[0].device.type != "cpu" or cpu_backend() != "cpp":
        collective(*tensors)
        return
    from pagewire.kernels.cpu.library import from_python  # compiles the C++ kernels, which a GPU has no use for

    def run(*tensors: Tensor) -> None:
        with _disable_current_modes():
            collective(*tensors)

    from_python(run, *tensors)

"""Ranks with a GPU each (NCCL), or on several machines' CPUs (gloo): a communicator through torch.distributed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pagewire.services.executor.parallel.peer_sums import PeerSums

_groups: list[dist.ProcessGroup] = []
# The same function by its names in torch 2.13 and in earlier versions.
_all_gather_single: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_all_to_all_single: Callable[..., object] = dist.all_to_all_single

# Registered as ops, so that a recorded step contains them like any other torch op; they find their group by its index.
_library = torch.library.Library("pagewire_ranks", "DEF")


def _all_reduce(x: Tensor, group: int) -> None:
    dist.all_reduce(x, group=_groups[group])


def _all_gather(parts: Tensor, x: Tensor, group: int) -> None:
    _all_gather_single(parts, x, group=_groups[group])


def _all_to_all(x: Tensor, rows: Tensor, starts: Tensor, group: int) -> None:
    """On CUDA the host waits for `starts`."""
    size, rank = _groups[group].size(), _groups[group].rank()
    bounds = starts.tolist()

    def between(to: int, by: int) -> Tensor:
        edge = to * size + by
        return rows[bounds[edge] : bounds[edge + 1] if to != by else bounds[edge]]

    sent, received = [between(to, rank) for to in range(size)], [between(rank, by) for by in range(size)]
    arrived = x.new_empty(sum(map(len, received)), x.shape[1])
    counts = [len(part) for part in received], [len(part) for part in sent]
    _all_to_all_single(arrived, x[torch.cat(sent)], *counts, group=_groups[group])
    x[torch.cat(received)] = arrived


def _broadcast(x: Tensor, root: int, group: int) -> None:
    dist.broadcast(x, group=_groups[group], group_src=root)


for _schema, _function in (
    ("all_reduce(Tensor(a!) x, int group) -> ()", _all_reduce),
    ("all_gather(Tensor(a!) parts, Tensor x, int group) -> ()", _all_gather),
    ("all_to_all(Tensor(a!) x, Tensor rows, Tensor starts, int group) -> ()", _all_to_all),
    ("broadcast(Tensor(a!) x, int root, int group) -> ()", _broadcast),
):
    _library.define(_schema)
    for _device in ("CPU", "CUDA"):
        _library.impl(_schema.partition("(")[0], _function, _device)
_ops = torch.ops.pagewire_ranks


class TorchCommunicator:
    """A `Communicator`. The order of sums depends on the library but not on timing, and all ranks receive the same
    bits: both libraries add in rings, which compute each part of a sum once. Small sums of GPUs that share memory are
    added without a library, in the order of ranks.

    On CUDA, calls only launch, on the current stream; they may be captured in a graph after one has run uncaptured.
    """

    def __init__(self, group: dist.ProcessGroup, peer_sums: PeerSums | None = None) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._peer_sums = peer_sums
        self._index = len(_groups)
        _groups.append(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._peer_sums is not None and self._peer_sums.takes(x):
            self._peer_sums.all_reduce(x)
        else:
            _ops.all_reduce.default(x, self._index)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        parts = torch.empty((self.size * rows, columns), dtype=x.dtype, device=x.device)
        _ops.all_gather.default(parts, x.contiguous(), self._index)
        return parts.view(self.size, rows, columns).transpose(0, 1).reshape(rows, self.size * columns)

    def all_to_all(self, x: Tensor, rows: Tensor, starts: Tensor) -> None:
        """Exchanges rows. The host waits for `starts`, so this cannot be captured."""
        _ops.all_to_all.default(x, rows, starts, self._index)

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        x = x.contiguous()
        _ops.broadcast.default(x, root, self._index)
        return x

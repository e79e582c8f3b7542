"""Sums of small tensors through memory of GPUs that all ranks of a group can read (`pagewire.kernels.peer_memory`)."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.peer_memory import MOST_RANKS, PARTS, PEER_BYTES, most_summed
from pagewire.services.executor import stats

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

logger = logging.getLogger(__name__)


class PeerSums:
    """One rank's part. Calls only launch, on the current stream, and may be captured in a graph."""

    def __init__(self, peers: Tensor, epochs: Tensor, rank: int, memory: object = None) -> None:
        """peers and epochs as `ops.peer_all_reduce` has them. memory: what has to live as long as this."""
        self._peers, self._epochs, self._rank, self._memory = peers, epochs, rank, memory
        self._most_bytes = most_summed(len(peers))

    def takes(self, x: Tensor) -> bool:
        """Returns whether x is summed so: the same on all ranks, as it follows from shape and dtype."""
        return x.nbytes <= self._most_bytes and x.dtype in _DTYPES

    def all_reduce(self, x: Tensor) -> None:
        """Sums a contiguous x in place."""
        ops.peer_all_reduce(x, self._peers, self._epochs, self._rank)


def share_memory(group: dist.ProcessGroup, device: torch.device, on_one_machine: bool) -> PeerSums | None:
    """Shares memory among the GPUs of a group's ranks, of which `device` is this one's; None on all ranks where that is
    impossible, which is logged and counted. On the device thread."""
    devices = _devices_of(group, device) if on_one_machine else []
    reason = _refused(group.size(), devices)
    # Ranks agree twice: to share is a collective, which all have to begin, and which may fail on some.
    shared = None
    if _all(group, device, reason is None):
        try:
            shared = _shared(group, device)
        except (ImportError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
        if not _all(group, device, shared is not None):
            shared = None
    if shared is None:
        stats.LIBRARY_SUMS.inc()
        logger.warning("small sums of GPUs go through NCCL, which is slower: %s", reason or "another rank cannot share")
        return None
    logger.info("small sums of %d GPUs are added in one launch, through memory that they share", group.size())
    return shared


def _refused(size: int, devices: list[int]) -> str | None:
    if size > MOST_RANKS:
        return f"{size} ranks are more than {MOST_RANKS}"
    if len(set(devices)) < size:
        return "the ranks are not on one machine, with a GPU each"
    own, *others = devices
    if not all(torch.cuda.can_device_access_peer(own, other) for other in others if other != own):
        return f"GPU {own} cannot read the memory of all others"
    return None


def _devices_of(group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Returns the indices of all ranks' devices, this rank's first."""
    index = torch.tensor([device.index or 0], device=device)
    found = [torch.empty_like(index) for _ in range(group.size())]
    dist.all_gather(found, index, group=group)
    return [int(found[(group.rank() + place) % group.size()]) for place in range(group.size())]


def _all(group: dist.ProcessGroup, device: torch.device, is_so: bool) -> bool:
    answer = torch.tensor([int(is_so)], device=device)
    dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=group)
    return bool(answer)


def _shared(group: dist.ProcessGroup, device: torch.device) -> PeerSums:
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(PEER_BYTES, dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)  # before any rank writes a flag
    handle = symmetric.rendezvous(memory, group.group_name)
    # Memory may come from a pool: it lies as far behind the beginning of an allocation on all ranks.
    offset = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    peers = torch.tensor([address + offset for address in handle.buffer_ptrs], dtype=torch.int64, device=device)
    return PeerSums(peers, torch.zeros(PARTS, dtype=torch.int32, device=device), group.rank(), (memory, handle))

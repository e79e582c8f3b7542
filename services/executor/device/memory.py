"""Memory of the device: whether the host reads it, its size, its free part, and the error if something does not fit."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire.errors import StartupError
from pagewire.process import cgroup


def is_shared(device: torch.device) -> bool:
    """Returns whether host and device share memory: launched work is done then, and reading does not wait."""
    return device.type == "cpu"


class OutOfMemoryError(StartupError):
    """The model or its KV cache does not fit; the message has both numbers and the remedy."""


@dataclass(frozen=True)
class DeviceMemory:
    """A CUDA device's memory at one moment, bytes."""

    total: int
    free: int
    reserved: int  # by this process' torch, used or not

    @property
    def outside_torch(self) -> int:
        """Memory of other processes, and CUDA's own for this process."""
        return self.total - self.free - self.reserved


def mib(num_bytes: int) -> str:
    return f"{num_bytes / 1024**2:.1f} MiB"


available_cpu_bytes = cgroup.free_memory


def cuda_memory(device: torch.device) -> DeviceMemory:
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device))


def available_bytes(device: torch.device) -> int:
    return available_cpu_bytes() if device.type == "cpu" else cuda_memory(device).free


def check_weights_fit(weight_bytes: int, device: torch.device) -> None:
    """Raises OutOfMemoryError before memory is taken for weights that cannot fit."""
    available = available_bytes(device)
    if weight_bytes > available:
        raise OutOfMemoryError(
            f"the weights need {mib(weight_bytes)}, {device} has {mib(available)} free; use a smaller model or "
            "--dtype bfloat16, or a larger device"
        )


def check_positions_fit(num_positions: int, head_dim: int) -> None:
    """Raises OutOfMemoryError for a table of rotary positions that does not fit into host memory, where it is made."""
    num_bytes = 3 * num_positions * head_dim * 4  # in fp32: angles, their cosines and sines, both side by side
    available = available_cpu_bytes()
    if num_bytes > available:
        raise OutOfMemoryError(
            f"{num_positions} positions need {mib(num_bytes)}, {mib(available)} are free; lower --max-model-len"
        )


def check_kv_cache_fits(num_bytes: int, device: torch.device, flag: str) -> None:
    """Raises OutOfMemoryError for a cache of a size that `flag` asks for and the device does not have.

    On the CPU, pages are allocated only when they are touched: too large a cache would end the process under load.
    """
    available = available_bytes(device)
    if num_bytes > available:
        raise OutOfMemoryError(
            f"the KV cache would be {mib(num_bytes)}, {device} has {mib(available)} free; lower {flag}"
        )


def resident_bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the resident bytes of contiguous tensors in host memory: the pages that were touched."""
    return sum(_resident_pages(tensor.data_ptr(), tensor.nbytes) for tensor in tensors) * mmap.PAGESIZE


def _resident_pages(address: int, num_bytes: int) -> int:
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    length = address + num_bytes - start
    pages = np.empty(-(-length // mmap.PAGESIZE), dtype=np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_void_p(pages.ctypes.data)) != 0:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int(np.count_nonzero(pages & 1))  # the other bits are reserved

"""The cost of loading from a tier, measured at start; the scheduler learns how it changes."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MEMORY_BYTES, _DISK_BYTES = 16 * 1024**2, 4 * 1024**2


@dataclass(frozen=True)
class Rate:
    """The cost of loading from a tier."""

    bytes_per_second: float = 0.0  # 0 = unknown
    latency: float = 0.0  # seconds, besides


def of_memory(num_bytes: int = _MEMORY_BYTES) -> Rate:
    """Measures copies in memory of the host."""
    source, target = np.ones(num_bytes, dtype=np.uint8), np.zeros(num_bytes, dtype=np.uint8)
    began = time.perf_counter()
    np.copyto(target, source)
    return Rate(num_bytes / (time.perf_counter() - began))


def of_directory(folder: Path, num_bytes: int = _DISK_BYTES) -> Rate:
    """Measures reads of a file that is not in the system's memory, where it is not always either. Unknown if the
    directory cannot be written."""
    path = folder / secrets.token_hex(8)
    try:
        with path.open("xb", buffering=0) as file:
            file.write(os.urandom(num_bytes))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            file.read(4096)
            latency = time.perf_counter() - began
            file.readall()
        return Rate(num_bytes / (time.perf_counter() - began), latency)
    except OSError:
        return Rate()
    finally:
        with contextlib.suppress(OSError):
            path.unlink()

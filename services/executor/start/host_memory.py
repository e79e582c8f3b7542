"""Pinned memory that is there before requests are served."""

from __future__ import annotations

import torch

from pagewire.services.executor.device.upload import SMALLEST_BYTES, host_memory

# The largest size of a copy that no step asks the driver for, and how many of a size are on their way at once.
LARGEST_BYTES, NUM_RESERVED = 1 << 22, 4


def reserve(device: torch.device) -> None:
    """Allocates host memory that copies while serving will use, in all its sizes, for torch's allocator to keep."""
    size = SMALLEST_BYTES
    while size <= LARGEST_BYTES:
        _ = [host_memory((size,), torch.uint8, device) for _ in range(NUM_RESERVED)]  # together, or it were one memory
        size *= 2

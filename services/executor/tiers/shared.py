"""The memory of slots: private, or shared so that other executors of the host can copy blocks from it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np


class Memory:
    """Private memory; pages that were never used take no room."""

    def __init__(self, num_slots: Sequence[int], block_bytes: Sequence[int]) -> None:
        """num_slots, block_bytes: of each group."""
        sizes = [slots * size for slots, size in zip(num_slots, block_bytes, strict=True)]
        whole = np.frombuffer(mmap.mmap(-1, max(1, sum(sizes))), dtype=np.uint8)
        starts = np.cumsum([0, *sizes]).tolist()
        self.parts = [  # uint8 [slots, block_bytes] of each group
            whole[start : start + size].reshape(slots, -1) if size else np.empty((0, 0), np.uint8)
            for start, size, slots in zip(starts, sizes, num_slots, strict=False)
        ]

    def show(self, group: int, index: int, digest: bytes, checksum: int) -> None:
        """Lets other executors find a block that is complete."""

    def hide(self, group: int, index: int) -> None:
        """Lets them find it no more."""

    def close(self) -> None:
        """Deletes it for others."""

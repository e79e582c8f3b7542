"""Block tables of all rows: append-only lists of block ids, in host memory and on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.executor.step import ProtocolError
from services.executor.upload import upload


def ragged_arange(counts: np.ndarray) -> np.ndarray:
    """Counts up within each run: [2, 0, 3] -> [0, 1, 0, 1, 2]; int64 [sum(counts)]."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


class BlockTable:
    """`tensor[row]` = the ordered block ids of the request in that row; entries past `num_blocks[row]` are stale."""

    def __init__(self, max_num_seqs: int, max_blocks_per_row: int, num_pool_blocks: int, device: torch.device) -> None:
        self._device = device
        self._num_pool_blocks = num_pool_blocks
        # The host computes slots from its own copy. On the CPU both are the same memory.
        self.host = np.zeros((max_num_seqs, max_blocks_per_row), dtype=np.int32)
        self.tensor: Tensor = (
            torch.from_numpy(self.host)
            if device.type == "cpu"
            else torch.zeros(self.host.shape, dtype=torch.int32, device=device)
        )  # int32 [max_num_seqs, max_blocks_per_row]
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)  # [max_num_seqs]

    def clear(self, row: int) -> None:
        self.num_blocks[row] = 0

    def append(self, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        """Appends counts[i] of the concatenated block_ids to rows[i]; rows are distinct. Raises ProtocolError."""
        if counts.sum() != len(block_ids) or (counts < 0).any():
            raise ProtocolError(f"{len(block_ids)} block ids for {counts.sum()} announced")
        if not len(block_ids):
            return
        if block_ids.min() < 0 or block_ids.max() >= self._num_pool_blocks:
            raise ProtocolError(
                f"block id {block_ids.max() if block_ids.min() >= 0 else block_ids.min()} is outside the pool of "
                f"{self._num_pool_blocks} blocks"
            )
        filled = self.num_blocks[rows]
        if (filled + counts).max() > self.host.shape[1]:
            raise ProtocolError(f"a request has more than the {self.host.shape[1]} blocks of the longest request")
        table_rows = np.repeat(rows, counts)
        columns = np.repeat(filled, counts) + ragged_arange(counts)
        self.host[table_rows, columns] = block_ids
        self.num_blocks[rows] = filled + counts
        if self._device.type != "cpu":
            # As a flat write behind the steps that still read the old entries, in stream order.
            staged = upload(
                self._device,
                {"flat": table_rows * self.host.shape[1] + columns, "block_ids": block_ids.astype(np.int32)},
            )
            self.tensor.view(-1)[staged["flat"]] = staged["block_ids"]

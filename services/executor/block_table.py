"""Block tables of all rows: append-only lists of block ids, on the device. The host knows how long each is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewire.services.executor.step import InvalidStep
from pagewire.services.executor.upload import upload


class BlockTable:
    """`tensor[row]` = the ordered block ids of the request in that row; entries past `num_blocks[row]` are stale."""

    def __init__(self, max_num_seqs: int, max_blocks_per_row: int, num_pool_blocks: int, device: torch.device) -> None:
        self._device = device
        self._num_pool_blocks = num_pool_blocks
        self._max_blocks = max_blocks_per_row
        # int32 [max_num_seqs, max_blocks_per_row]
        self.tensor: Tensor = torch.zeros(max_num_seqs, max_blocks_per_row, dtype=torch.int32, device=device)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)  # [max_num_seqs]

    def fill(self, rows: np.ndarray, block_ids: Sequence[np.ndarray]) -> None:
        """Starts the tables of rows that were just given to requests, which may share blocks. Raises InvalidStep."""
        counts = np.array([len(ids) for ids in block_ids], dtype=np.int64)
        self.num_blocks[rows] = 0
        joined = np.concatenate(block_ids).astype(np.int32)
        self._count(rows, counts, joined)
        uploaded = upload(self._device, {"block_ids": joined})["block_ids"]
        for row, ids in zip(rows.tolist(), uploaded.split(counts.tolist()), strict=True):
            self.tensor[row, : len(ids)] = ids

    def append(self, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        """Counts counts[i] more blocks for rows[i]; rows and new blocks are distinct. Raises InvalidStep.

        `step_inputs` writes them to the tensor, behind the steps that still read the old entries.
        """
        if len(block_ids) > self._num_pool_blocks:
            raise InvalidStep(f"{len(block_ids)} new blocks; the pool has {self._num_pool_blocks}")
        self._count(rows, counts, block_ids)

    def _count(self, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        if counts.sum() != len(block_ids) or (counts < 0).any():
            raise InvalidStep(f"{len(block_ids)} block ids for {counts.sum()} announced")
        if not len(block_ids):
            return
        if block_ids.min() < 0 or block_ids.max() >= self._num_pool_blocks:
            raise InvalidStep(
                f"block id {block_ids.max() if block_ids.min() >= 0 else block_ids.min()} is outside the pool of "
                f"{self._num_pool_blocks} blocks"
            )
        if (self.num_blocks[rows] + counts).max() > self._max_blocks:
            raise InvalidStep(f"a request has more than the {self._max_blocks} blocks of the longest request")
        self.num_blocks[rows] += counts

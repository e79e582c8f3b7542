"""Block tables of all rows: append-only lists of block ids, on the device. The host knows how long each is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.ops import ROW_ALIGNMENT
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.step.step import Blocks, InvalidStep


class BlockTables:
    """`tensor[group, row]` = the ordered block ids, in a group's cache, of the request in that row.

    Entries past `num_blocks[row, group]` are stale, as are those that a group's window has passed.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_row: int,
        pool_sizes: Sequence[int],
        block_tokens: Sequence[int],
        device: torch.device,
    ) -> None:
        """pool_sizes [G]: blocks in each group's cache. block_tokens [G]: tokens per block of each group."""
        self.num_groups = len(pool_sizes)
        self.num_pool_blocks = sum(pool_sizes)
        self._device = device
        self._pool_sizes = np.array(pool_sizes, dtype=np.int64)
        self._block_tokens = np.array(block_tokens, dtype=np.int64)
        self._max_blocks = max_blocks_per_row
        shape = (self.num_groups, max_num_seqs, -(-max_blocks_per_row // ROW_ALIGNMENT) * ROW_ALIGNMENT)
        # int32 [G, max_num_seqs, at least max_blocks_per_row]
        self.tensor: Tensor = torch.zeros(shape, dtype=torch.int32, device=device)
        self.num_blocks = np.zeros((max_num_seqs, self.num_groups), dtype=np.int64)  # [max_num_seqs, G]

    def fill(self, rows: np.ndarray, blocks: Sequence[Sequence[Blocks]]) -> None:
        """Starts the tables of rows that were just given to requests, which may share blocks. Raises InvalidStep.

        blocks: for each row, the blocks of each group.
        """
        for row, row_blocks in zip(rows.tolist(), blocks, strict=True):
            if len(row_blocks) != self.num_groups:
                raise InvalidStep(f"a new request has blocks in {len(row_blocks)} groups; there are {self.num_groups}")
            self.num_blocks[row] = [part.first for part in row_blocks]
        if (self.num_blocks[rows] < 0).any():
            raise InvalidStep("a new request's blocks begin before its block table")
        if not self.num_groups:
            return
        parts = [part.ids for row_blocks in blocks for part in row_blocks]
        counts = np.array([len(ids) for ids in parts], dtype=np.int64)
        joined = np.concatenate(parts).astype(np.int32)
        firsts = self.num_blocks[rows].ravel().tolist()
        self._count(rows, counts.reshape(len(rows), self.num_groups), joined)
        uploaded = upload(self._device, {"block_ids": joined})["block_ids"].split(counts.tolist())
        tables = [self.tensor[group, row] for row in rows.tolist() for group in range(self.num_groups)]
        for table, first, ids in zip(tables, firsts, uploaded, strict=True):
            table[first : first + len(ids)] = ids

    def append(self, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        """Counts counts[i, g] more blocks for rows[i]; rows and new blocks are distinct. Raises InvalidStep.

        `step_inputs` writes them to the tensor, behind the steps that still read the old entries.
        """
        if counts.shape != (len(rows), self.num_groups):
            raise InvalidStep(f"new blocks of {counts.shape} requests and groups; there are {self.num_groups} groups")
        if len(block_ids) > self.num_pool_blocks:
            raise InvalidStep(f"{len(block_ids)} new blocks; the pool has {self.num_pool_blocks}")
        self._count(rows, counts, block_ids)

    def num_slots(self, rows: np.ndarray, max_model_len: int) -> np.ndarray:
        """Returns int64 [n], the tokens that a row's tables cover in all groups; without groups, max_model_len."""
        reaches: np.ndarray = self.num_blocks[rows] * self._block_tokens
        return reaches.min(axis=1) if self.num_groups else np.full(len(rows), max_model_len)

    def _count(self, rows: np.ndarray, counts: np.ndarray, block_ids: np.ndarray) -> None:
        if counts.sum() != len(block_ids) or (counts < 0).any():
            raise InvalidStep(f"{len(block_ids)} block ids for {counts.sum()} announced")
        if not len(block_ids):
            return
        pool_sizes = np.repeat(np.tile(self._pool_sizes, len(rows)), counts.ravel())
        wrong = (block_ids < 0) | (block_ids >= pool_sizes)
        if wrong.any():
            index = int(np.flatnonzero(wrong)[0])
            raise InvalidStep(f"block id {block_ids[index]} is outside the pool of {pool_sizes[index]} blocks")
        if (self.num_blocks[rows] + counts).max() > self._max_blocks:
            raise InvalidStep(f"a request has more than the {self._max_blocks} blocks of the longest request")
        self.num_blocks[rows] += counts

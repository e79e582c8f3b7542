"""Rows that go from rank to rank in an `all_to_all`, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routes:
    rows: Tensor  # int32
    starts: Tensor  # int32 [size * size + 1]
    size: int

    @classmethod
    def of(cls, counts: Sequence[int], size: int) -> Routes:
        """Draws routes. counts[d * size + s]: rows from s to d. Each row has one way, at random."""
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        rows = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(sum(counts))).int()
        return cls(rows, starts, size)

    def given_by(self, rank: int, width: int, dtype: torch.dtype) -> Tensor:
        """Random rows."""
        return (10 * torch.randn(self.num_rows, width, generator=torch.Generator().manual_seed(rank))).to(dtype)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def expected(self, rank: int, parts: Sequence[Tensor]) -> Tensor:
        """Returns what becomes of a rank's part."""
        result, bounds = parts[rank].clone(), self.starts.tolist()
        for by, part in enumerate(parts):
            edge = rank * self.size + by
            chosen = self.rows[bounds[edge] : bounds[edge + 1]].long()
            result[chosen] = part[chosen]
        return result

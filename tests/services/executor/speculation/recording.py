"""A head that drafts, and knows what."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.speculation.heads import HeadProposer

NUM_DRAFTS = 3


class Recording(HeadProposer):
    """Knows what it has drafted last, by row."""

    drafts: dict[int, list[int]]

    def propose(self, step: Any, batch: InputBatch, state: Any, block_tables: Any) -> np.ndarray | None:
        drafted = super().propose(step, batch, state, block_tables)
        self.drafts = {
            row: state.token_ids[row, n : n + NUM_DRAFTS].tolist()
            for row in batch.rows.tolist()
            for n in [int(state.columns.num_tokens[row])]
        }
        return drafted

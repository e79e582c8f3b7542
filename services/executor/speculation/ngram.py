"""N-grams, or prompt lookup: what followed the last few tokens where the same text had them before.

https://github.com/apoorvumang/prompt-lookup-decoding. It takes no model, and pays where outputs repeat what is in the
prompt or in themselves: edits of code, summaries with quotes, tables.
"""

from __future__ import annotations

import numpy as np

from pagewire.services.executor.block_table import BlockTables
from pagewire.services.executor.input_batch import InputBatch
from pagewire.services.executor.request_state import RequestState
from pagewire.services.executor.speculation.lookup import continuation
from pagewire.services.executor.step import Step


class NgramProposer:
    """A `Proposer` of rows in memory that the host reads."""

    def __init__(self, max_draft_tokens: int, longest: int, shortest: int) -> None:
        """longest, shortest: of the last tokens that are looked for."""
        self.max_draft_tokens = max_draft_tokens
        self._longest, self._shortest = longest, shortest

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        if batch.num_samples is None:
            return None
        token_ids, num_tokens = state.token_ids.numpy(), state.columns.num_tokens.numpy()
        drafted = np.zeros(len(batch.rows), dtype=np.int64)
        wanted = (batch.num_samples - 1).tolist()
        for index, row, count in zip(batch.sampled.tolist(), batch.sampled_rows.tolist(), wanted, strict=True):
            if count:
                num_known = num_tokens[row]
                drafts = continuation(token_ids[row, :num_known], self._longest, self._shortest, count)
                token_ids[row, num_known : num_known + len(drafts)] = drafts
                drafted[index] = len(drafts)
        return drafted

    def reset(self) -> None: ...

    def on_other_weights(self) -> None: ...

"""N-grams, or prompt lookup: drafts the tokens that followed an earlier occurrence of the last few tokens.

https://github.com/apoorvumang/prompt-lookup-decoding. It needs no model, and pays off if outputs repeat the prompt or
themselves: edits of code, summaries with quotes, tables.
"""

from __future__ import annotations

import numpy as np
import torch

from pagewire.kernels import ops
from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.device import memory
from pagewire.services.executor.device.upload import upload
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.step.step import Step


class NgramProposer(Proposer):
    """A proposer that looks up n-grams. On CUDA it drafts an arbitrary token if nothing is found."""

    methods = ("ngram",)

    def __init__(self, max_draft_tokens: int, longest: int, shortest: int) -> None:
        """longest, shortest: numbers of last tokens to look for, see `ops.look_up_drafts`."""
        self.max_draft_tokens = max_draft_tokens
        self._longest, self._shortest = longest, shortest

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        if batch.num_samples is None or step.num_draft_tokens is None:
            return None
        device, wanted = state.token_ids.device, step.num_draft_tokens[batch.sampled]
        asking = np.flatnonzero(wanted)
        rows, num_wanted = batch.sampled_rows[asking], wanted[asking]
        staged = upload(device, {"rows": rows.astype(np.int32), "num_wanted": num_wanted.astype(np.int32)})
        num_found = torch.empty(len(asking), dtype=torch.int64, device=device)
        known, bounds = state.columns.num_tokens, (self._longest, self._shortest)
        ops.look_up_drafts(staged["rows"], staged["num_wanted"], state.token_ids, known, num_found, *bounds)
        if not memory.is_shared(device):
            return None
        drafted = np.zeros(len(batch.rows), dtype=np.int64)
        drafted[batch.sampled[asking]] = num_found.numpy()
        return drafted

"""A proposer for tests, which knows what each request generates, and offers it, or something else."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.step.step import Step
from tests.services.executor.helpers.stepping import VOCAB_SIZE


@dataclass
class KnownTexts(Proposer):
    """Each draft is the right token with probability `accuracy`, another one otherwise."""

    texts: list[list[int]]  # prompts with the output that plain decoding gives them
    accuracy: float
    max_draft_tokens: int = 3
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def propose(self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables) -> None:
        if batch.num_samples is None:
            return
        for row, count in zip(batch.sampled_rows.tolist(), (batch.num_samples - 1).tolist(), strict=True):
            num_known = int(state.columns.num_tokens[row])
            known = state.token_ids[row, :num_known].tolist()
            rest = next((text[num_known:] for text in self.texts if text[:num_known] == known), [])
            for index in range(count):
                right = rest[index] if index < len(rest) else 0
                is_right = self.random.random() < self.accuracy
                offer = right if is_right else (right + int(self.random.integers(1, VOCAB_SIZE))) % VOCAB_SIZE
                state.token_ids[row, num_known + index] = offer

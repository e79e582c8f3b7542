"""Drafts of a head: a layer that reads the target's intermediate results in addition to the tokens.

A head is a drafting model that is one token behind: at the position of a token it reads the feature of that token,
which the target has stored, and the next token. If the target has not computed a token, its feature is the head's own
output; the step that checks the drafts overwrites it, like keys and values.
"""

from __future__ import annotations

from torch import Tensor

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import BatchShape
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.dense.gemma2 import GemmaModel
from pagewire.services.executor.models.drafting.draft_head import DraftHead
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.draft_steps import DraftSteps, Target


class HeadSteps(DraftSteps):
    """Rounds of a head."""

    reads_ahead = 1

    def __init__(self, head: DraftHead, target: Target, state: RequestState, block_tables: BlockTables) -> None:
        super().__init__(head, target, state, block_tables)
        self._head = head

    def _sample(self, hidden: Tensor, shape: BatchShape) -> Tensor:
        rows = self._inputs.sample_rows(shape.num_sampled)
        features = self._inputs.select_sampled(shape, hidden)[:, self._head.config.hidden_size :]
        next_positions = self._rows.columns.num_computed_tokens[rows.clamp(min=0).long()]
        self._head.features.write(features.contiguous(), rows, next_positions, self._block_tables.tensor)
        return super()._sample(hidden, shape)


class HeadProposer(DraftModel):
    """A head, which reads the features of its model."""

    lag = 1

    def __init__(self, target: Target, head: DraftHead, max_draft_tokens: int, max_len: int) -> None:
        super().__init__(target, head, max_draft_tokens, max_len)
        self._head = head
        assert isinstance(target.model, CausalModel | GemmaModel)
        target.model.observer = head.features

    def _make_steps(self, state: RequestState, block_tables: BlockTables) -> DraftSteps:
        return HeadSteps(self._head, self._target, state, block_tables)

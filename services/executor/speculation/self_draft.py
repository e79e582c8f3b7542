"""Drafts of a copy of the model in fewer bits (`self:q4`), which needs no other checkpoint.

The copy attends over the model's KV cache, which holds everything that the model has computed of a request, prompts and
prefixes included. The copy itself writes keys and values of the last known token and of its drafts. The next step has
the same tokens and overwrites these keys and values before they are read. So the copy needs no cache, no prompt and no
state of a request in addition to the model's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pagewire.services.executor.batch.block_table import BlockTables
from pagewire.services.executor.batch.input_batch import BatchShape, InputBatch
from pagewire.services.executor.batch.request_state import RequestState
from pagewire.services.executor.graphs.capture_sizes import drafter_shapes
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.speculation.draft_steps import DraftSteps, Target
from pagewire.services.executor.speculation.model_proposer import ModelProposer
from pagewire.services.executor.speculation.quantized_copy import refresh, rounding
from pagewire.services.executor.step.step import Step

logger = logging.getLogger(__name__)

# A request that arrives while a copy is made waits for a piece that takes this long.
_PIECE_S = 0.1


class SelfDraft(ModelProposer):
    """A proposer that runs a quantized copy of the model, which shares the model's KV cache."""

    methods = ("self",)

    def __init__(self, target: Target, copy: OwnModel, bits: int, max_draft_tokens: int) -> None:
        """copy: the target's `quantized_copy` in this number of bits."""
        self.max_draft_tokens = max_draft_tokens
        self._target, self._copy, self._bits = target, copy, bits

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        if batch.num_samples is None or step.num_draft_tokens is None:
            return None
        if self._steps is None:
            self._steps = DraftSteps(self._copy, self._target, state, block_tables)
        self._steps.start()
        self._steps.draft(step, batch, step.num_draft_tokens)
        return None

    def graph_shapes(self, sizes: Sequence[int], prompts: Sequence[int] = ()) -> list[BatchShape]:
        return drafter_shapes(sizes, self._target.limits, 1)

    def on_other_weights(self) -> None:
        assert isinstance(self._target.model, OwnModel)
        refresh(self._copy, self._target.model, self._bits)


class IdleSelfDraft(SelfDraft):
    """The same with a copy that is rounded piece by piece while no request waits, so that a start takes no longer.
    Until it is complete, nothing is drafted."""

    _is_complete = False
    _seconds = 0.0  # of the device's thread

    def __init__(self, target: Target, copy: OwnModel, bits: int, max_draft_tokens: int) -> None:
        """copy: the target's `shared_copy`, which gets its weights in this number of bits."""
        super().__init__(target, copy, bits, max_draft_tokens)
        self._left: Iterator[None] | None = self._rounding()

    def prefer(self, method: int) -> bool:
        return self._left is None

    def _rounding(self) -> Iterator[None]:
        assert isinstance(self._target.model, OwnModel)
        return rounding(self._copy, self._target.model, self._bits, in_place=self._is_complete)

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        if self._steps is None:  # so that its steps can be recorded before the first of them
            self._steps = DraftSteps(self._copy, self._target, state, block_tables)
        if self._left is None:
            return super().propose(step, batch, state, block_tables)
        return None if step.num_draft_tokens is None else np.zeros_like(step.num_draft_tokens)

    @torch.inference_mode()
    def prepare(self) -> bool:
        if self._left is None:
            return False
        started = time.thread_time()
        for _ in self._left:
            if (taken := time.thread_time() - started) > _PIECE_S:
                self._seconds += taken
                return True
        self._left, self._is_complete = None, True
        logger.info("the copy of the model in %d bits drafts; making it took %.1f s", self._bits, self._seconds)
        return True

    def record_missing(self) -> bool:
        return self._left is None and super().record_missing()

    def on_other_weights(self) -> None:
        self._left = self._rounding()

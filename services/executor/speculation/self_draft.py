"""Drafts of a copy of the model in fewer bits (`self:q4`), which needs no other checkpoint.

The copy attends over the model's own KV cache: what is known of a request lies there as the model itself has computed
it, prompts and prefixes included. What the copy writes there are keys and values of the last known token and of its
drafts, which are those of the step that follows: it overwrites them before anybody reads them. So there is no cache, no
prompt and no state of a request beside the model's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from pagewire.errors import StartupError
from pagewire.services.executor.block_table import BlockTables
from pagewire.services.executor.cuda_graphs import Steps
from pagewire.services.executor.input_batch import InputBatch
from pagewire.services.executor.limits import Limits
from pagewire.services.executor.models.protocol import Model, OwnModel
from pagewire.services.executor.request_state import RequestState
from pagewire.services.executor.speculation.draft_steps import DraftSteps, with_blocks_of, without_blocks
from pagewire.services.executor.speculation.quantized_copy import quantized_copy, refresh
from pagewire.services.executor.step import Step

PREFIX = "self:q"
BITS = (4, 3, 2)


def bits_of(name: str) -> int | None:
    """Of `self:q4` and its like; None: it is another kind of name. Raises StartupError for bits there are not."""
    if not name.startswith("self:"):
        return None
    if name not in (names := [f"{PREFIX}{bits}" for bits in BITS]):
        raise StartupError(f"speculative model {name!r}: a copy of the model itself is one of {', '.join(names)}")
    return int(name.removeprefix(PREFIX))


class SelfDraft:
    """A `Proposer`."""

    def __init__(
        self,
        model: Model,
        bits: int,
        max_draft_tokens: int,
        limits: Limits,
        device: torch.device,
        *,
        split_size: int = 0,
        graphs: Callable[[], Steps | None] = lambda: None,
    ) -> None:
        """limits: of the runner's rows and steps. split_size, graphs: as of `ModelRunner`. Raises StartupError for a
        model that has no copy."""
        if not isinstance(model, OwnModel):
            raise StartupError(
                f"{PREFIX}{bits}: {model.config.architecture} runs in transformers' code, which is not quantized here; "
                "use another method, such as ngram"
            )
        self.max_draft_tokens = max_draft_tokens
        self._model, self._bits = model, bits
        self._copy = quantized_copy(model, bits)
        self._limits, self._device, self._split_size, self._graphs = limits, device, split_size, graphs
        self._steps: DraftSteps | None = None

    @property
    def num_bytes(self) -> int:
        """That the copy takes beside the model."""
        own = {id(part) for module in self._model.modules() for part in module.parts}
        return sum(part.nbytes for module in self._copy.modules() for part in module.parts if id(part) not in own)

    def propose(
        self, step: Step, batch: InputBatch, state: RequestState, block_tables: BlockTables
    ) -> np.ndarray | None:
        counts = step.num_draft_tokens
        if counts is None or not counts.any():
            return None
        if self._steps is None:
            graphs = self._graphs()
            limits, device = self._limits, self._device
            self._steps = DraftSteps(self._copy, limits, state, block_tables, device, self._split_size, graphs)
        # Those with the most drafts first: who has enough leaves at the end.
        order = np.argsort(-counts, kind="stable")
        self._steps.start()
        for drafted in range(int(counts.max())):
            indices = order[: int((counts > drafted).sum())]
            blocks = without_blocks(len(indices), block_tables.num_groups) if drafted else with_blocks_of(step, indices)
            self._steps.run(blocks, batch.rows[indices], np.ones_like(indices), np.arange(len(indices)))
        return None

    def on_other_weights(self) -> None:
        refresh(self._copy, self._model, self._bits)

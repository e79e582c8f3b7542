"""Draft heads: a layer behind a model, which reads what the model has computed on the way.

At each position a head reads the embedding of the next token beside a feature. Of tokens that the target has computed,
the features are the target's; behind them, what the head itself makes of the position before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pagewire.services.executor.layers.embedding import Embedding
from pagewire.services.executor.layers.kv_spec import LatentSpec
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.models.protocol import OwnModel
from pagewire.services.executor.step.step_context import StepContext


class FeatureMemory:
    """Keeps the feature of every token that the target computes, in blocks as keys and values are.

    The target calls it (`causal.Observer`), inside of its forward pass, so that recorded steps and graphs do it, too.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.layer_idx = 1
        self.dtype = dtype
        self._spec = LatentSpec(1, size, dtype)

    def see(self, layer_idx: int, stream: Callable[[], Tensor], context: StepContext) -> None: ...

    def end(self, hidden: Tensor, context: StepContext) -> None: ...

    def kv_spec(self) -> LatentSpec:
        return self._spec

    def bind(self, kv_cache: Tensor, group: int, block_tokens: int) -> None:
        self._memory = kv_cache.flatten(0, 1)  # [slots, size]; of the last block, which no request has, for padding
        self._nowhere = len(self._memory) - 1
        self._group = group
        self._block_tokens = block_tokens

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def keep(self, features: Tensor, context: StepContext) -> None:
        """features [num_tokens, size]"""
        slots = context.slot_mappings[self._group]
        self._memory.index_copy_(0, slots.masked_fill(slots < 0, self._nowhere), features)

    def read(self, context: StepContext) -> Tensor:
        """[num_tokens, size]"""
        slots = context.slot_mappings[self._group]
        return self._memory.index_select(0, slots.masked_fill(slots < 0, self._nowhere))

    def write(self, features: Tensor, rows: Tensor, positions: Tensor, block_tables: Tensor) -> None:
        """Stores features [m, size] of positions int64 [m] of rows int32 [m], -1 = padding; block_tables as
        `BlockTables.tensor`."""
        table = block_tables[self._group]
        places = (positions // self._block_tokens).clamp(max=table.shape[1] - 1)  # of padding they mean nothing
        blocks = table[rows.clamp(min=0).long(), places].long()
        slots = blocks * self._block_tokens + positions % self._block_tokens
        self._memory.index_copy_(0, slots.masked_fill(rows < 0, self._nowhere), features)


class OwnOutputs(FeatureMemory):
    """The target's own, as they go to its output projection."""

    def end(self, hidden: Tensor, context: StepContext) -> None:
        self.keep(hidden, context)


class DraftHead(OwnModel):
    """A draft model for one target, which supplies its features as `observer`."""

    features: FeatureMemory
    embed: Embedding  # the target's, or its own
    own_embed: Embedding | None = None

    def add_embedding(self, placement: Placement) -> None:
        """Gives the head an embedding of its own, in place of the target's."""
        self.embed = self.own_embed = Embedding(
            "embed_tokens", self.config.vocab_size, self.config.hidden_size, placement
        )

    @abstractmethod
    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        """Returns [num_tokens, 2 * hidden_size] for input_ids int64 [num_tokens], of each position the next token: what
        logits are made of, and the feature of the next position."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits. hidden: as `forward` returns it."""

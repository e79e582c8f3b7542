"""Draft heads: a layer behind a model, which reads the model's intermediate results.

At each position a head reads the embedding of the next token and a feature. For tokens that the target has computed the
features are the target's; for later tokens, the head's own output at the previous position.
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
    """Keeps the feature of every token that the target computes, in blocks like keys and values.

    The target calls it (`causal.Observer`) inside its forward pass, so recorded steps and graphs include it.
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
        self._memory = kv_cache.flatten(0, 1)  # [slots, size]; the last block is for padding
        self._nowhere = len(self._memory) - 1
        self._group = group
        self._block_tokens = block_tokens

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())

    def keep(self, features: Tensor, context: StepContext) -> None:
        """features [num_tokens, size]"""
        slots = context.slot_mappings[self._group]
        self._memory.index_copy_(0, slots.masked_fill(slots < 0, self._nowhere), features.to(self._memory.dtype))

    def read(self, context: StepContext) -> Tensor:
        """[num_tokens, size]"""
        slots = context.slot_mappings[self._group]
        return self._memory.index_select(0, slots.masked_fill(slots < 0, self._nowhere))

    def write(self, features: Tensor, rows: Tensor, positions: Tensor, block_tables: Tensor) -> None:
        """Stores features [m, size] of positions int64 [m] of rows int32 [m], -1 = padding; block_tables as
        `BlockTables.tensor`."""
        table = block_tables[self._group]
        places = (positions // self._block_tokens).clamp(max=table.shape[1] - 1)  # meaningless for padding
        blocks = table[rows.clamp(min=0).long(), places].long()
        slots = blocks * self._block_tokens + positions % self._block_tokens
        self._memory.index_copy_(0, slots.masked_fill(rows < 0, self._nowhere), features)


class OwnOutputs(FeatureMemory):
    """The target's features: the input of its output projection."""

    def end(self, hidden: Tensor, context: StepContext) -> None:
        self.keep(hidden, context)


class DraftHead(OwnModel):
    """A draft model for one target, which supplies its features as `observer`."""

    features: FeatureMemory
    embed: Embedding  # the target's, or its own
    own_embed: Embedding | None = None

    def add_embedding(self, placement: Placement) -> None:
        """Gives the head its own embedding instead of the target's."""
        self.embed = self.own_embed = Embedding(
            "embed_tokens", self.config.vocab_size, self.config.hidden_size, placement
        )

    @abstractmethod
    def forward(self, input_ids: Tensor, context: StepContext) -> Tensor:
        """Returns [num_tokens, 2 * hidden_size]: the head's input for logits, and the feature of the next position.
        input_ids int64 [num_tokens]: the next token of each position."""

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits. hidden: as `forward` returns it."""

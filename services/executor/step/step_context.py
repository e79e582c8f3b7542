"""The context of a step, which every layer receives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepImages:
    """The part of prompts with images that a step computes, up to the last image."""

    embeddings: Tensor | None  # [k, hidden_size], of the placeholder tokens among the step's tokens; None = no such
    tokens: Tensor  # int64 [k], where each belongs in the batch
    rope_positions: Tensor | None  # int64 [3, p], see `StepContext.position_deltas`; None = the tokens' positions
    rope_tokens: Tensor | None  # int64 [p], where each belongs in the batch

    def merge(self, hidden: Tensor) -> Tensor:
        """Writes the images' embeddings over those of their placeholders, in place. hidden [num_tokens, hidden_size]"""
        return (
            hidden if self.embeddings is None else hidden.index_copy_(0, self.tokens, self.embeddings.to(hidden.dtype))
        )


@dataclass(frozen=True)
class Stream:
    """The stream from stage to stage of a pipeline. The memory is the same in each step of a size."""

    hidden: Tensor  # [num_tokens, hidden_size], the output of the last layer before
    residual: Tensor  # [num_tokens, hidden_size], what all layers before that have added up


@dataclass(frozen=True)
class StepContext:
    """One step's ragged batch. Request b's query tokens are `query_start_loc[b] : query_start_loc[b + 1]`.

    Example, block_size 4: row 7 decodes its 6th token, row 3 prefills 3 tokens of an empty context:

        positions       = [5, 0, 1, 2]                      rows            = [7, 3]
        query_start_loc = [0, 1, 4]    seq_lens = [6, 3]    block_tables[0]  = [[7, 2], [5, -]]
        max_query_len   = 3                                 slot_mappings[0] = [9, 20, 21, 22]

    Layers that keep the same are a group, which has a cache and block tables of its own (`kv_cache`). Blocks of states
    are for more tokens than those of others.
    """

    positions: Tensor  # int64 [num_tokens], within the request
    rows: Tensor  # int32 [num_reqs], idx_mapping: batch index -> row; -1 = padding
    query_start_loc: Tensor  # int32 [num_reqs + 1]
    seq_lens: Tensor  # int32 [num_reqs], context_len + query_len; 0 = padding
    # By group: int32 [num_reqs, max_blocks], batch_idx -> ordered block ids. Those of tokens that no query of the step
    # sees, as they lie before a group's window, are stale.
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]  # by group: int64 [num_tokens], -1 = padding; means nothing of a group of states
    max_query_len: int
    min_query_len: int = 1  # of requests that are no padding; no more than the shortest
    split_size: int = 0  # tokens of context per attention program; 0 = chosen on the device from all lengths
    images: StepImages | None = None  # of a step that computes some: its launches are never recorded
    # int64 [max_num_seqs], by row. Where image tokens rotate by time, height and width, a token behind the images
    # rotates by its position plus this; None = by its position.
    position_deltas: Tensor | None = None
    rope_table: Tensor | None = None  # fp32 [num_tokens, rotary_dim]: a rotary table for this step alone
    stream: Stream | None = None  # a stage but the first finds it here, and all but the last leave it here
    adapter_slots: Tensor | None = None  # int32 [num_tokens], from 0, -1 = none; None: no token has an adapter
    second_text_start: Tensor | None = None  # int64 [max_num_seqs], row -> position; beyond all where there is one text
    plans: dict[Hashable, Tensor | None] = field(default_factory=dict)  # by layers that attend alike

    def plan(self, key: Hashable, make: Callable[[], Tensor | None]) -> Tensor | None:
        """Returns the plan of the step's attention; the first of the layers with this key makes it."""
        if key not in self.plans:
            self.plans[key] = make()
        return self.plans[key]

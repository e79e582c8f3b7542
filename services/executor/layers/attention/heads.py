"""A rank's heads of an attention layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.config.parallel import heads_refusal
from pagewire.services.executor.config.load_error import ModelLoadError
from pagewire.services.executor.config.model_config import DecoderConfig
from pagewire.services.executor.layers.parts import indices
from pagewire.services.executor.layers.placement import Placement


@dataclass(frozen=True)
class Heads:
    """Neighbouring query heads, and the KV heads that they read.

    If there are fewer KV heads than ranks, several ranks have the same one.
    """

    queries: range
    keys: range
    num_heads: int  # of the whole layer
    num_kv_heads: int
    head_dim: int

    @property
    def is_whole(self) -> bool:
        return len(self.queries) == self.num_heads

    @property
    def query_rows(self) -> range:
        """Returns the rank's rows of a projection that gives all queries."""
        return scaled(self.queries, self.head_dim)

    @property
    def key_rows(self) -> range:
        """Returns the rank's rows of a projection that gives all keys, or all values."""
        return scaled(self.keys, self.head_dim)

    def rows(self, order: Tensor | None = None) -> Tensor | None:
        """Returns the rank's rows of a projection that gives all queries, all keys and all values. order: the order of
        its rows (`row_order`)."""
        if self.is_whole:
            return order
        first_key = self.num_heads * self.head_dim
        first_value = first_key + self.num_kv_heads * self.head_dim
        keys = indices(self.key_rows)
        rows = torch.cat((indices(self.query_rows), first_key + keys, first_value + keys))
        return rows if order is None else order[rows]


def scaled(heads: range, size: int) -> range:
    """Returns the rows of these heads, `size` for each."""
    return range(heads.start * size, heads.stop * size)


def heads_of(config: DecoderConfig, placement: Placement) -> Heads:
    """Raises ModelLoadError for heads that cannot be shared; it names the possible numbers of ranks."""
    return shared_heads(config.num_heads, config.num_kv_heads, config.head_dim, placement)


def shared_heads(num_heads: int, num_kv_heads: int, head_dim: int, placement: Placement) -> Heads:
    """Returns the heads, as `heads_of` does."""
    ranks = placement.tensor

    if (refused := heads_refusal(ranks.size, num_heads, num_kv_heads)) is not None:
        raise ModelLoadError(refused)
    each, first = num_heads // ranks.size, ranks.rank * num_kv_heads // ranks.size
    queries = range(ranks.rank * each, (ranks.rank + 1) * each)
    return Heads(queries, range(first, first + max(1, num_kv_heads // ranks.size)), num_heads, num_kv_heads, head_dim)

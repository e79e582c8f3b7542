"""A layer's need of KV cache: what it keeps of earlier tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of some heads. Layers of equal specs share one allocation (`kv_cache`).

    A layer that keeps something else of every token (one latent vector) states it by a subclass.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # as stored
    window: int = 0  # keys that a query sees, itself included; 0 = all

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """Returns the shape of one block in one layer; 0 = keys, 1 = values."""
        return (2, self.num_kv_heads, block_size, self.head_dim)

    def page_bytes(self, block_size: int) -> int:
        return math.prod(self.page_shape(block_size)) * self.dtype.itemsize


@dataclass(frozen=True)
class LatentSpec(KVSpec):
    """One vector that stands for the keys and values of all heads: head_dim is its size, num_kv_heads 1."""

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        return (block_size, self.head_dim)


@dataclass(frozen=True)
class StateSpec:
    """A state of constant size that stands for all tokens so far: `size` numbers in fp32.

    A block holds that after the tokens up to a multiple of `Limits.state_tokens`, or as far as they are computed.
    """

    size: int
    dtype: torch.dtype = torch.float32

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """Returns the shape of one block in one layer, whatever the block_size is."""
        return (self.size,)

    def page_bytes(self, block_size: int) -> int:
        return self.size * self.dtype.itemsize


CacheSpec: TypeAlias = KVSpec | StateSpec


@runtime_checkable
class CachingLayer(Protocol):
    """A layer that keeps something between steps."""

    layer_idx: int  # of the decoder layer, as checkpoints number them

    def kv_spec(self) -> CacheSpec: ...

    def bind(self, kv_cache: Tensor, group: int, block_tokens: int) -> None:
        """Tells it which memory it has: [num_blocks, *page_shape], each block contiguous.

        group: of layers that share block tables, which say where a request's blocks are. block_tokens: that a block is
        for."""

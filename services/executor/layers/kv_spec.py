"""A layer's demand for KV cache: the data that it keeps of earlier tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from pagewire.kernels import ops


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of some heads. Layers of equal specs share one allocation (`kv_cache`).

    A layer that keeps other data of every token (one latent vector) uses a subclass.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # as stored
    window: int = 0  # keys that a query sees, itself included; 0 = all

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """Returns the shape of one block in one layer; 0 = keys, 1 = values. In int8, a block also has scales."""
        if self.dtype is torch.int8:
            return (ops.int8_page_bytes(self.num_kv_heads, block_size, self.head_dim),)
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
    """A state of constant size that represents all previous tokens: `size` numbers in fp32.

    A block holds the state after tokens up to a multiple of `Limits.state_tokens`, or up to the last computed token.
    """

    size: int
    dtype: torch.dtype = torch.float32

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """Returns the shape of one block in one layer, for any block_size."""
        return (self.size,)

    def page_bytes(self, block_size: int) -> int:
        return self.size * self.dtype.itemsize


CacheSpec: TypeAlias = KVSpec | StateSpec


@runtime_checkable
class CachingLayer(Protocol):
    """A layer that keeps data between steps."""

    layer_idx: int  # the decoder layer's number in checkpoints

    def kv_spec(self) -> CacheSpec: ...

    def bind(self, kv_cache: Tensor, group: int, block_tokens: int) -> None:
        """Sets its memory: [num_blocks, *page_shape], each block contiguous.

        group: index of the layers that share block tables, which locate a request's blocks. block_tokens: tokens per
        block."""

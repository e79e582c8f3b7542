"""What an attention layer keeps of every token, from which the KV cache is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of some heads. Layers of equal specs share one allocation (`kv_cache`).

    A layer that keeps something else (one latent vector, a state) states it by a spec of its own with these properties.
    """

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # as stored
    window: int = 0  # keys that a query sees, itself included; 0 = all

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        """Of one block in one layer; 0 = keys, 1 = values."""
        return (2, self.num_kv_heads, block_size, self.head_dim)

    def page_bytes(self, block_size: int) -> int:
        return math.prod(self.page_shape(block_size)) * self.dtype.itemsize


@dataclass(frozen=True)
class LatentSpec(KVSpec):
    """One vector that stands for the keys and values of all heads: head_dim is its size, num_kv_heads 1."""

    def page_shape(self, block_size: int) -> tuple[int, ...]:
        return (block_size, self.head_dim)

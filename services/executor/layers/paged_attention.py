"""Attention over paged KV: a layer's need of KV cache, and its call into the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.layers.kv_spec import KVSpec
from pagewire.services.executor.step_context import StepContext

FP8 = torch.float8_e4m3fn


class PagedAttention:
    """Causal attention of one layer over its own KV cache; `kv_cache` is bound after the cache is allocated."""

    __slots__ = ("_spec", "kv_cache", "kv_scales", "layer_idx", "scale", "soft_cap", "window")

    kv_cache: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim], each block contiguous

    def __init__(self, layer_idx: int, spec: KVSpec, scale: float, soft_cap: float = 0.0) -> None:
        """layer_idx: of the decoder layer, as checkpoints number them. spec: of a cache without scales."""
        self.layer_idx = layer_idx
        self.scale = scale
        self.window = spec.window
        self.soft_cap = soft_cap
        self.kv_scales: Tensor | None = None  # fp32 [2, num_kv_heads], of keys and of values; fp8 caches only
        self._spec = spec

    def kv_spec(self) -> KVSpec:
        return self._spec if self.kv_scales is None else replace(self._spec, dtype=FP8)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        """None: its projections have the weights."""
        return iter(())

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: StepContext) -> Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]."""
        ops.store_kv(key, value, self.kv_cache, context.slot_mapping, self.kv_scales)
        return self.attend(query, context)

    def attend(self, query: Tensor, context: StepContext) -> Tensor:
        """As `__call__`, with keys and values already in the cache."""
        return ops.paged_attention(
            query,
            self.kv_cache,
            context.block_table,
            context.query_start_loc,
            context.seq_lens,
            context.max_query_len,
            self.scale,
            self.window,
            self.soft_cap,
            self.kv_scales,
            context.split_size,
        )

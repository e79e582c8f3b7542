"""Attention over paged KV: a layer's demand for KV cache, and its calls of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.layers.attention.sinks import Sinks
from pagewire.services.executor.layers.kv_spec import KVSpec
from pagewire.services.executor.step.step_context import StepContext

FP8 = torch.float8_e4m3fn


class PagedAttention:
    """Causal attention of one layer over its own KV cache, which `bind` sets once it is allocated."""

    __slots__ = (
        "_spec",
        "cache_dtype",
        "cache_scales",
        "group",
        "kv_cache",
        "kv_scales",
        "layer_idx",
        "scale",
        "sinks",
        "soft_cap",
        "stored_heads",
        "window",
    )

    can_be_8_bits = True  # the cache
    kv_cache: Tensor  # [num_blocks, 2, num_kv_heads, block_size, head_dim], each block contiguous
    cache_scales: Tensor | None  # of a cache of 8 bits (`ops.attention`); those of int8 are in the cache
    group: int  # index of the group of layers that share block tables, which locate a request's keys and values

    def __init__(
        self, layer_idx: int, spec: KVSpec, scale: float, soft_cap: float = 0.0, sinks: Sinks | None = None
    ) -> None:
        """layer_idx: the decoder layer's number in checkpoints. spec: of a cache without scales."""
        self.layer_idx = layer_idx
        self.scale = scale
        self.window = spec.window
        self.soft_cap = soft_cap
        self.sinks = None if sinks is None else sinks.scores
        self.cache_dtype = spec.dtype  # FP8, torch.int8, or that of the model
        self.kv_scales: Tensor | None = None  # fp32 [2, num_kv_heads], of keys and of values; fp8 caches only
        # The KV heads of a checkpoint that it has, and the checkpoint's number of KV heads.
        self.stored_heads = (range(spec.num_kv_heads), spec.num_kv_heads)
        self._spec = spec

    def bind(self, kv_cache: Tensor, group: int, block_tokens: int) -> None:
        self.cache_scales = self.kv_scales
        if kv_cache.dtype is torch.int8:
            heads, size = self._spec.num_kv_heads, self._spec.head_dim
            kv_cache, self.cache_scales = ops.int8_pages(kv_cache, heads, block_tokens, size)
        self.kv_cache = kv_cache
        self.group = group

    def kv_spec(self) -> KVSpec:
        return replace(self._spec, dtype=self.cache_dtype)

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        """Returns none: its projections have the weights."""
        return iter(())

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, context: StepContext) -> Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim]."""
        ops.store_kv(key, value, self.kv_cache, self.slots(context), self.cache_scales)
        return self.attend(query, context)

    def slots(self, context: StepContext) -> Tensor:
        """Returns int64 [num_tokens], the slot in this layer's cache for each token's key and value; -1 = none."""
        return context.slot_mappings[self.group]

    def attend(self, query: Tensor, context: StepContext) -> Tensor:
        """Attends like `__call__`, with keys and values already in the cache; the result is of the model's dtype."""
        table = context.block_tables[self.group]
        lengths = (context.query_start_loc, context.seq_lens, context.max_query_len, context.min_query_len)
        plan = context.plan(
            (self.group, query.shape[1]),
            lambda: ops.plan_attention(query, self.kv_cache, table, *lengths, self.window, context.split_size),
        )
        return ops.paged_attention(
            query,
            self.kv_cache,
            table,
            *lengths,
            self.scale,
            self.window,
            self.soft_cap,
            self.cache_scales,
            self.sinks,
            context.split_size,
            plan,
            self._spec.dtype if query.dtype is torch.float32 else None,
        )

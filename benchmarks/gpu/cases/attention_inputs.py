"""Random paged batches for attention kernels, several sets of them, and what the specification says to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.gpu.measure import num_sets
from pagewire.kernels import ops, reference
from pagewire.kernels.ops import ROW_ALIGNMENT

FP8 = torch.float8_e4m3fn
# Tokens at either end of a long query that are compared with the specification.
CHECKED = 128
# Of one token's result, in 16-bit dtypes.
TOLERANCE = 2e-2


@dataclass(frozen=True)
class Features:
    """Features of `pagewire.kernels.ops.paged_attention`, off by default."""

    sliding_window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    split_size: int = 0


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one batch; lengths are in tokens, seq_len is context and query together."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    features: Features = Features()
    layers: int = 1  # their pages lie side by side, as the executor has them; with several, a set is a layer's pages

    @property
    def kv_bytes(self) -> int:
        """Keys and values of every token that a query attends to, each read once."""
        window = self.features.sliding_window or max(self.seq_lens)
        tokens = sum(min(s, window + q - 1) for q, s in zip(self.query_lens, self.seq_lens, strict=True))
        return tokens * 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """KV, query and output."""
        return self.kv_bytes + 2 * sum(self.query_lens) * self.num_heads * self.head_dim * self.dtype.itemsize

    @property
    def num_flops(self) -> int:
        """The operations of both products for all pairs that the causal mask leaves: 4 * head_dim per pair and head."""
        pairs = sum(q * (s - q) + q * (q + 1) // 2 for q, s in zip(self.query_lens, self.seq_lens, strict=True))
        return 4 * self.num_heads * self.head_dim * pairs

    @property
    def uniform(self) -> bool:
        return len({*zip(self.query_lens, self.seq_lens, strict=True)}) == 1


@dataclass(frozen=True)
class AttentionInputs:
    """One batch's tables and several sets of its tensors; as `pagewire.kernels.ops.paged_attention` describes them."""

    shape: AttentionShape
    queries: list[Tensor]  # each [num_tokens, num_heads, head_dim]
    kv_caches: list[Tensor]  # each [num_blocks, 2, num_kv_heads, block_size, head_dim]
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    kv_scales: Tensor | None
    sinks: Tensor | None

    @property
    def max_query_len(self) -> int:
        return max(self.shape.query_lens)

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    @cached_property
    def expected(self) -> tuple[Tensor, Tensor]:
        """Returns the reference results of the first set: (indices of tokens, their results).

        Of a long query only the first and the last CHECKED tokens: each end is a request of its own that owns the
        first pages. The specification keeps whole score matrices.
        """
        starts, device = self.query_start_loc.tolist(), self.seq_lens.device
        tokens, results = [], []
        for request, (query_len, seq_len) in enumerate(zip(self.shape.query_lens, self.shape.seq_lens, strict=True)):
            long = query_len > 2 * CHECKED
            for first, end in ((0, CHECKED), (query_len - CHECKED, query_len)) if long else ((0, query_len),):
                tokens.append(torch.arange(starts[request] + first, starts[request] + end, device=device))
                results.append(
                    reference.paged_attention(
                        self.queries[0][tokens[-1]],
                        self.kv_caches[0],
                        self.block_table[request : request + 1],
                        torch.tensor([0, end - first], dtype=torch.int32),
                        torch.tensor([seq_len - query_len + end], dtype=torch.int32),
                        end - first,
                        end - first,
                        self.scale,
                        *self._features(),
                        None,
                    )
                )
        return torch.cat(tokens), torch.cat(results)

    @cached_property
    def plan(self) -> Tensor | None:
        """Made once, as a step makes it for all of its layers."""
        features = self.shape.features
        return ops.plan_attention(
            self.queries[0],
            self.kv_caches[0],
            *self._batch(),
            features.sliding_window,
            features.split_size,
        )

    def call(self, index: int) -> Tensor:
        """Our kernel on one set."""
        return self._call(index, self.plan)

    def call_with_plan(self, index: int) -> Tensor:
        """The same, and the making of a plan for it."""
        return self._call(index, None)

    def _call(self, index: int, plan: Tensor | None) -> Tensor:
        return ops.paged_attention(
            self.queries[index], self.kv_caches[index], *self._batch(), self.scale, *self._features(), plan, None
        )

    def _batch(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        return self.block_table, self.query_start_loc, self.seq_lens, self.max_query_len, min(self.shape.query_lens)

    def call_alone(self, request: int) -> Tensor:
        """Our kernel on the first set, for one request of a decode batch."""
        return ops.paged_attention(
            self.queries[0][request : request + 1],
            self.kv_caches[0],
            self.block_table[request : request + 1],
            self.query_start_loc[:2],
            self.seq_lens[request : request + 1],
            1,
            1,
            self.scale,
            *self._features(),
            None,
            None,
        )

    def _features(self) -> tuple[int, float, Tensor | None, Tensor | None, int]:
        """The op's last arguments but the plan."""
        features = self.shape.features
        return features.sliding_window, features.soft_cap, self.kv_scales, self.sinks, features.split_size


def make_inputs(shape: AttentionShape, device: torch.device) -> AttentionInputs:
    """Pages in random order. What no request owns is NaN, and all table entries past a request's end point there."""
    num_pages = [-(-seq_len // shape.block_size) for seq_len in shape.seq_lens]
    poisoned = sum(num_pages)
    width = -(-max(num_pages) // ROW_ALIGNMENT) * ROW_ALIGNMENT  # as the executor has it
    table = torch.full((len(num_pages), width), poisoned, dtype=torch.int32)
    for row, ids in enumerate(torch.randperm(poisoned).int().split(num_pages)):
        table[row, : len(ids)] = ids
    page_shape = (2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    kv_caches: list[Tensor] = []
    sets = num_sets(shape.num_bytes, device)
    while len(kv_caches) < sets:
        cache = torch.randn(poisoned + 1, shape.layers, *page_shape, dtype=shape.dtype, device=device)
        cache[poisoned] = torch.nan
        kv_caches += cache.to(shape.kv_dtype).unbind(1)
    starts = [0]
    for query_len in shape.query_lens:
        starts.append(starts[-1] + query_len)
    scales = torch.rand(2, shape.num_kv_heads, device=device) + 0.5 if shape.kv_dtype == FP8 else None
    return AttentionInputs(
        shape,
        [torch.randn(starts[-1], shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device) for _ in kv_caches],
        kv_caches,
        table.to(device),
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(shape.seq_lens, dtype=torch.int32, device=device),
        scales,
        torch.randn(shape.num_heads, device=device) if shape.features.sinks else None,
    )


def error(output: Tensor, inputs: AttentionInputs) -> float:
    """Returns the error of the worst token of a result [num_tokens, num_heads, head_dim] for the first set."""
    tokens, expected = inputs.expected
    difference = (output[tokens].float() - expected.float()).flatten(1).norm(dim=1)
    # max() would pass over NaN in Python, torch's does not.
    return float((difference / expected.float().flatten(1).norm(dim=1)).max())

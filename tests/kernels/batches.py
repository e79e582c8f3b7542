"""Random arguments of the larger ops, shared by the kernel tests (and run in the Triton subprocesses)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from pagewire.kernels import ops, reference

# Not a block id of any cache here: a kernel that reads a block table past a request's length crashes or gets nonsense.
GARBAGE_BLOCK_ID = 2**30

# A group of layers, and the layer with the view of the group's cache that is tested.
LAYERS, LAYER = 5, 3


def one_layer_of_a_group(kv_cache: Tensor, kv_scales: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (a cache [num_blocks, LAYERS, ...], its view `[:, LAYER]`, and the scales): what kv_cache holds in the
    view, else NaN."""
    num_blocks, *page = kv_cache.shape
    if kv_cache.dtype == torch.int8:
        size = ops.int8_page_bytes(*page[1:])
        group = torch.full((num_blocks, LAYERS, size), -1, dtype=torch.int8)  # NaN as scales
        return group, *copied_into(group[:, LAYER], kv_cache, kv_scales)
    group = torch.full((num_blocks, LAYERS, *page), float("nan"), dtype=torch.float32).to(kv_cache.dtype)
    group[:, LAYER] = kv_cache
    return group, group[:, LAYER], kv_scales


def copied_into(pages: Tensor, kv_cache: Tensor, kv_scales: Tensor | None) -> tuple[Tensor, Tensor]:
    """Copies an int8 cache into the last of some pages; returns their views."""
    assert kv_scales is not None, "an int8 cache has scales"
    views = ops.int8_pages(pages, *kv_cache.shape[2:])
    for view, source in zip(views, (kv_cache, kv_scales), strict=True):
        view[len(view) - len(source) :] = source
    return views


def far_into_a_group(kv_cache: Tensor, kv_scales: Tensor | None = None) -> tuple[Tensor, Tensor | None, int]:
    """Returns (one layer's view of a group's cache in which kv_cache's blocks lie behind 2^31 elements, the scales,
    how many blocks later).

    The operating system hands out memory for the pages that are touched, not for the gigabytes before them.
    """
    num_blocks, *page = kv_cache.shape
    shift = 2**31 // (LAYERS * kv_cache[0].numel()) + 1
    if kv_cache.dtype == torch.int8:
        size = ops.int8_page_bytes(*page[1:])
        group = torch.empty((shift + num_blocks, LAYERS, size), dtype=torch.int8)
        return *copied_into(group[:, LAYER], kv_cache, kv_scales), shift
    view = torch.empty((shift + num_blocks, LAYERS, *page), dtype=kv_cache.dtype)[:, LAYER]
    view[shift:] = kv_cache
    return view, kv_scales, shift


def shortest_query(query_start_loc: Tensor, seq_lens: Tensor) -> int:
    """Returns the shortest query of the requests that are no padding."""
    return min(query_start_loc.diff()[seq_lens > 0].tolist(), default=1)


@dataclass(frozen=True)
class Batch:
    """The tensors of one paged_attention call. What no request owns in kv_cache is NaN."""

    query: Tensor
    kv_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    scale: float
    kv_scales: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def min_query_len(self) -> int:
        return shortest_query(self.query_start_loc, self.seq_lens)

    def args(self, sliding_window: int = 0, soft_cap: float = 0.0, split_size: int = 0) -> tuple[Any, ...]:
        return (
            self.query,
            self.kv_cache,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            self.max_query_len,
            self.min_query_len,
            self.scale,
            sliding_window,
            soft_cap,
            self.kv_scales,
            self.sinks,
            split_size,
            None,
            None,
        )

    def without_unseen_pages(self, sliding_window: int) -> Batch:
        """Returns the batch with garbage for the ids of pages that no query of their request sees any more."""
        block_size, query_lens = self.kv_cache.shape[3], self.query_start_loc.diff()
        first_seen = (self.seq_lens - query_lens - sliding_window + 1).clamp(min=0) // block_size
        is_behind = torch.arange(self.block_table.shape[1]) < first_seen[:, None]
        if not sliding_window:
            return self
        return replace(self, block_table=self.block_table.masked_fill(is_behind, GARBAGE_BLOCK_ID))

    def exact(self) -> Batch:
        """The same values in fp32, NaN replaced: what the reference computes the truth from."""
        kv_cache = self.kv_cache.float().nan_to_num()
        if self.kv_scales is not None and self.kv_scales.dim() == 4:
            kv_cache *= self.kv_scales.float().nan_to_num()[..., None]
        elif self.kv_scales is not None:
            kv_cache *= self.kv_scales[:, :, None, None]
        return replace(self, query=self.query.float().contiguous(), kv_cache=kv_cache, kv_scales=None)


def make_batch(
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    cache: str = "",
    sinks: bool = False,
    aligned_table: bool = True,
) -> Batch:
    """Requests on shuffled pages; the query is a strided view, as it is of a fused qkv projection.

    cache: "" for dtype; "fp8" with scales that differ per head; "int8" with one per token and head. aligned_table: its
    rows begin at multiples of eight ids, as the executor's do.
    """
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    num_pages = [-(-s // block_size) for s in seq_lens]
    num_blocks = sum(num_pages) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    width = -(-max(num_pages) // 8) * 8 if aligned_table else max(num_pages) + 2 | 1
    block_table = torch.full((len(seq_lens), width), GARBAGE_BLOCK_ID, dtype=torch.int32)
    kv_cache = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    kv_scales = None
    if cache == "fp8":
        kv_cache = kv_cache.to(torch.float8_e4m3fn)
        kv_scales = torch.rand(2, num_kv_heads, generator=generator) * 0.1 + 0.005
    elif cache == "int8":
        kv_cache, kv_scales = make_int8_pages(num_blocks, num_kv_heads, block_size, head_dim)
        kv_cache.fill_(77)
        kv_scales.fill_(float("nan"))
    for b, seq_len in enumerate(seq_lens):
        for page in range(num_pages[b]):
            block = free.pop()
            block_table[b, page] = block
            used = min(block_size, seq_len - page * block_size)
            values = torch.randn(2, num_kv_heads, used, head_dim, generator=generator)
            if cache == "int8" and kv_scales is not None:
                values, kv_scales[block, :, :, :used] = reference.quantized_rows(values, kv_scales.dtype)
            elif kv_scales is not None:
                values = (values / kv_scales[:, :, None, None]).clamp(-448, 448)
            kv_cache[block, :, :, :used] = values.to(kv_cache.dtype)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(sum(query_lens), width, generator=generator).to(dtype)
    return Batch(
        query=qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim),
        kv_cache=kv_cache,
        block_table=block_table,
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        max_query_len=max(query_lens),
        scale=head_dim**-0.5,
        kv_scales=kv_scales,
        sinks=torch.randn(num_heads, generator=generator) * 3 if sinks else None,
    )


@dataclass
class Heads:
    """The arguments of rotary_store_kv: query, key and value heads side by side, on their way into the cache."""

    positions: Tensor
    qkv: Tensor
    cos_sin_cache: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    kv_scales: Tensor | None

    def args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def copy(self) -> Heads:
        if self.kv_cache.dtype == torch.int8:
            pages = make_int8_pages(len(self.kv_cache), *self.kv_cache.shape[2:])
            assert self.kv_scales is not None
            pages[0].copy_(self.kv_cache)
            pages[1].copy_(self.kv_scales)
            return replace(self, qkv=self.qkv.clone(), kv_cache=pages[0], kv_scales=pages[1])
        return replace(self, qkv=self.qkv.clone(), kv_cache=self.kv_cache.clone())


def make_int8_pages(num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns kv_cache and kv_scales of zeros."""
    size = ops.int8_page_bytes(num_kv_heads, block_size, head_dim)
    return ops.int8_pages(torch.zeros(num_blocks, size, dtype=torch.int8), num_kv_heads, block_size, head_dim)


def make_heads(
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    rotary_dim: int = 64,
    norm: bool = False,
    cache: str = "",
) -> Heads:
    """Random heads, strided as in a wider projection; every third token is padding."""
    all_heads, block_size = num_heads + 2 * num_kv_heads, 16
    num_blocks = num_tokens // block_size + 3
    slot_mapping = torch.randperm(num_blocks * block_size)[:num_tokens]
    slot_mapping[2::3] = -1
    angles = torch.arange(200)[:, None] * 10000 ** (-torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    cache_dtype = torch.float8_e4m3fn if cache == "fp8" else dtype
    kv_cache = torch.zeros(num_blocks, 2, num_kv_heads, block_size, head_dim).to(cache_dtype)
    kv_scales = torch.rand(2, num_kv_heads) * 0.05 + 0.001 if cache == "fp8" else None
    if cache == "int8":
        kv_cache, kv_scales = make_int8_pages(num_blocks, num_kv_heads, block_size, head_dim)
    weights = torch.randn(2, head_dim).to(dtype)
    wider = torch.randn(num_tokens, all_heads + 1, head_dim).to(dtype)
    return Heads(
        positions=torch.randint(0, 200, (num_tokens,)),
        qkv=wider[:, :all_heads],
        cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=1).float(),
        kv_cache=kv_cache,
        slot_mapping=slot_mapping,
        q_weight=weights[0] if norm else None,
        k_weight=weights[1] if norm else None,
        eps=1e-5,
        kv_scales=kv_scales,
    )


@dataclass(frozen=True)
class LatentBatch:
    """The tensors of one latent_attention call. What no request owns in kv_cache is NaN."""

    query: Tensor
    kv_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    scale: float
    latent_dim: int

    def args(self, split_size: int = 0) -> tuple[Any, ...]:
        tables = (self.block_table, self.query_start_loc, self.seq_lens)
        lens = self.max_query_len, shortest_query(self.query_start_loc, self.seq_lens)
        return (self.query, self.kv_cache, *tables, *lens, self.scale, self.latent_dim, split_size, None)

    def exact(self) -> LatentBatch:
        """The same values in fp32, NaN replaced."""
        return replace(self, query=self.query.float(), kv_cache=self.kv_cache.float().nan_to_num())


def make_latent_batch(
    query_lens: list[int],
    context_lens: list[int],
    num_heads: int,
    latent_dim: int,
    rotary_dim: int,
    *,
    dtype: torch.dtype,
    block_size: int = 16,
    seed: int = 0,
) -> LatentBatch:
    """Computes `make_batch`, with the keys of its one KV head as the latent vectors; one layer of a group."""
    width = latent_dim + rotary_dim
    batch = make_batch(
        query_lens, context_lens, num_heads=num_heads, num_kv_heads=1, head_dim=width, block_size=block_size,
        dtype=dtype, seed=seed,
    )  # fmt: skip
    tables = (batch.block_table, batch.query_start_loc, batch.seq_lens, batch.max_query_len, batch.scale)
    return LatentBatch(batch.query.contiguous(), batch.kv_cache[:, 0, 0], *tables, latent_dim)


@dataclass
class Latents:
    """The arguments of rotary_store_latent."""

    positions: Tensor
    q: Tensor
    query: Tensor
    latent: Tensor
    cos_sin_cache: Tensor
    kv_cache: Tensor
    slot_mapping: Tensor
    norm_weight: Tensor
    eps: float
    interleaved: bool

    def args(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def copy(self) -> Latents:
        return replace(self, query=self.query.clone(), kv_cache=self.kv_cache.clone())


def make_latents(
    dtype: torch.dtype,
    num_tokens: int,
    num_heads: int,
    latent_dim: int,
    rotary_dim: int,
    *,
    interleaved: bool = True,
) -> Latents:
    """Random latents and query heads, strided as in a wider projection; every third token is padding."""
    width, block_size = latent_dim + rotary_dim, 16
    num_blocks = num_tokens // block_size + 3
    slot_mapping = torch.randperm(num_blocks * block_size)[:num_tokens]
    slot_mapping[2::3] = -1
    angles = torch.arange(200)[:, None] * 10000 ** (-torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    wider = torch.randn(num_tokens, num_heads * (24 + rotary_dim) + width).to(dtype)
    return Latents(
        positions=torch.randint(0, 200, (num_tokens,)),
        q=wider[:, :-width].view(num_tokens, num_heads, -1),
        query=torch.zeros(num_tokens, num_heads, width, dtype=dtype),
        latent=wider[:, -width:],
        cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=1).float(),
        kv_cache=torch.zeros(num_blocks, block_size, width, dtype=dtype),
        slot_mapping=slot_mapping,
        norm_weight=torch.randn(latent_dim).to(dtype),
        eps=1e-5,
        interleaved=interleaved,
    )


class StepRows:
    """The rows that step_inputs works on, and the host's exact counts beside them."""

    BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN, GROUPS = 4, 6, 90, 2

    def __init__(self) -> None:
        self.token_ids = torch.randint(0, 1000, (self.MAX_NUM_SEQS, self.MAX_MODEL_LEN), dtype=torch.int32)
        self.num_computed_tokens = torch.zeros(self.MAX_NUM_SEQS, dtype=torch.int64)
        max_blocks = -(-self.MAX_MODEL_LEN // self.BLOCK_SIZE)
        self.block_table = torch.full((self.GROUPS, self.MAX_NUM_SEQS, max_blocks), -7, dtype=torch.int32)
        self.lengths = [0] * self.MAX_NUM_SEQS
        self.num_blocks = [[0] * self.GROUPS for _ in range(self.MAX_NUM_SEQS)]

    def clone(self) -> StepRows:
        return copy.deepcopy(self)


def make_step(state: StepRows, batch: list[tuple[int, int]]) -> dict[str, Tensor]:
    """The tensors of one step; batch is (row, query_len), row -1 = padding. Outputs hold garbage (-5)."""
    num_blocks, new_ids, new_start = [], [], [0]
    for row, query_len in batch:
        num_blocks.append(list(state.num_blocks[row]) if row >= 0 else [0] * state.GROUPS)
        if row >= 0:
            state.lengths[row] += query_len
        for group in range(state.GROUPS):
            if row >= 0:
                needed = -(-state.lengths[row] // state.BLOCK_SIZE) + group  # one ahead in the second
                new_ids += [1000 * group + 100 * row + i for i in range(state.num_blocks[row][group], needed)]
                state.num_blocks[row][group] = needed
            new_start.append(len(new_ids))
    starts = torch.tensor([0, *(query_len for _, query_len in batch)]).cumsum(0)
    num_tokens, num_reqs = int(starts[-1]), len(batch)
    return {
        "rows": torch.tensor([row for row, _ in batch], dtype=torch.int32),
        "query_start_loc": starts.int(),
        "num_blocks": torch.tensor(num_blocks, dtype=torch.int32).view(num_reqs, state.GROUPS),
        "new_block_start_loc": torch.tensor(new_start, dtype=torch.int32),
        "new_block_ids": torch.tensor(new_ids, dtype=torch.int32),
        "token_ids": state.token_ids,
        "num_computed_tokens": state.num_computed_tokens,
        "row_block_table": state.block_table,
        "input_ids": torch.full((num_tokens,), -5),
        "positions": torch.full((num_tokens,), -5),
        "slot_mapping": torch.full((state.GROUPS, num_tokens + 3), -5)[:, :num_tokens],
        "seq_lens": torch.full((num_reqs,), -5, dtype=torch.int32),
        "block_table": torch.full((state.GROUPS, num_reqs, state.block_table.shape[2] + 2), -5, dtype=torch.int32),
    }


@dataclass(frozen=True)
class EncoderBatch:
    """The tensors of one encoder_attention call: query, key and value are views of one projection's output."""

    qkv: Tensor
    num_heads: int
    num_kv_heads: int
    query_start_loc: Tensor
    max_query_len: int

    @classmethod
    def of(
        cls,
        lengths: list[int],
        *,
        num_heads: int = 2,
        num_kv_heads: int = 2,
        head_dim: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> EncoderBatch:
        qkv = torch.randn(sum(lengths), num_heads + 2 * num_kv_heads, head_dim).to(dtype)
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return cls(qkv, num_heads, num_kv_heads, starts, max(lengths))

    def args(self, window: int = 0) -> tuple[Any, ...]:
        query, key, value = self.qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return query, key, value, self.query_start_loc, self.max_query_len, 0.3, window

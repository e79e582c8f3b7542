"""Random ragged batches for attention, shared by the kernel tests (and run in the Triton subprocesses)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Not a block id of any cache here: whoever reads a block table past a request's length crashes or gets nonsense.
GARBAGE_BLOCK_ID = 2**30


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

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, float]:
        return (
            self.query,
            self.kv_cache,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            self.max_query_len,
            self.scale,
        )

    def exact(self) -> Batch:
        """The same values in fp32, NaN replaced: what the reference computes the truth from."""
        return Batch(
            self.query.float().contiguous(),
            self.kv_cache.float().nan_to_num(),
            *self.args()[2:],
        )


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
) -> Batch:
    """Requests on shuffled pages; the query is a strided view, as it is of a fused qkv projection."""
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [q + c for q, c in zip(query_lens, context_lens, strict=True)]
    num_pages = [-(-s // block_size) for s in seq_lens]
    num_blocks = sum(num_pages) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    block_table = torch.full((len(seq_lens), max(num_pages) + 2), GARBAGE_BLOCK_ID, dtype=torch.int32)
    kv_cache = torch.full((num_blocks, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    for b, seq_len in enumerate(seq_lens):
        for page in range(num_pages[b]):
            block = free.pop()
            block_table[b, page] = block
            used = min(block_size, seq_len - page * block_size)
            values = torch.randn(2, num_kv_heads, used, head_dim, generator=generator)
            kv_cache[block, :, :, :used] = values.to(dtype)
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
    )

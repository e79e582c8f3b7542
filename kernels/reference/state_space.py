"""State-space layers (`pagewire.kernels.ops.state_space`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


def tokens_by_block(
    block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor, state_tokens: int
) -> Iterator[tuple[int | None, int, int, int]]:
    """Returns (block of the state before or None, block of the state after, first token, last token + 1) of all tokens
    of each request that are in one block, in order."""
    starts = query_start_loc.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            continue
        first, end = starts[b], starts[b + 1]
        table, position = block_table[b].tolist(), seq_len - (end - first)
        while first < end:
            place = position // state_tokens
            count = min(end - first, (place + 1) * state_tokens - position)
            before = table[(position - 1) // state_tokens] if position else None
            yield before, table[place], first, first + count
            first, position = first + count, position + count


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    state_tokens: int,
) -> Tensor:
    output = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for before, after, first, end in tokens_by_block(block_table, query_start_loc, seq_lens, state_tokens):
        tail = torch.zeros_like(state[after]) if before is None else state[before]
        rows = torch.cat([tail, x[first:end].float()])
        windows = rows.unfold(0, len(weight), 1)  # [tokens, channels, width]
        total = (windows * weight.float().t()).sum(-1)
        output[first:end] = F.silu(total if bias is None else total + bias.float()).to(x.dtype)
        state[after] = rows[len(rows) - len(tail) :]
    return output


def state_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    dt_min: float,
    dt_max: float,
    state: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    max_query_len: int,
    state_tokens: int,
) -> Tensor:
    output = torch.zeros_like(x, memory_format=torch.contiguous_format)
    steps = F.softplus(dt.float() + dt_bias).clamp(dt_min, dt_max)
    heads_per_group = x.shape[1] // b.shape[1]
    b, c = (part.float().repeat_interleave(heads_per_group, 1) for part in (b, c))
    for before, after, first, end in tokens_by_block(block_table, query_start_loc, seq_lens, state_tokens):
        h = torch.zeros_like(state[after]) if before is None else state[before].clone()
        for t in range(first, end):
            value, step = x[t].float(), steps[t, :, None]
            h = h * torch.exp(a[:, None] * step)[..., None] + (step * value)[..., None] * b[t, :, None]
            output[t] = ((h * c[t, :, None]).sum(-1) + d[:, None] * value).to(x.dtype)
        state[after] = h
    return output


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int) -> Tensor:
    groups = (x.float() * F.silu(gate.float())).unflatten(-1, (-1, group_size))
    normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
    return normed.flatten(-2).to(x.dtype) * weight

"""Attention without a cache (`pagewire.kernels.ops.encoder`)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from pagewire.kernels.reference.attention import rotary_embedding


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
) -> Tensor:
    """Request after request; `max_query_len` makes no difference to what is computed."""
    group = query.shape[1] // key.shape[1]
    output = torch.zeros_like(query)
    bounds = query_start_loc.tolist()
    for start, end in pairwise(bounds):
        rows = query[start:end].float().transpose(0, 1)
        keys, values = (x[start:end].float().transpose(0, 1).repeat_interleave(group, dim=0) for x in (key, value))
        scores = rows @ keys.transpose(1, 2) * scale
        if window > 0:
            scores.masked_fill_(~near(end - start, window, query.device), float("-inf"))
        output[start:end] = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
    return output


def near(length: int, window: int, device: torch.device) -> Tensor:
    """Returns bool [length, length]: the tokens of one request that each of them sees."""
    position = torch.arange(length, device=device)
    return (position[None, :] - position[:, None]).abs() <= window


def rotate(positions: Tensor, heads: Tensor, cos_sin_cache: Tensor) -> None:
    rotary_embedding(positions, heads, heads[:, :0], cos_sin_cache)

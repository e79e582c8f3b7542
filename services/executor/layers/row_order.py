"""Orders of a projection's rows in checkpoints that differ from the order in kernels: model row -> stored row."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_pairs_apart(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Returns the order of rows of heads that rotate neighbors (0, 1), (2, 3), ..., whereas kernels rotate (0, r / 2),
    (1, r / 2 + 1), ...

    int64 [num_heads * head_dim]. A head of 8 with rotary_dim 6: [0, 2, 4, 1, 3, 5, 6, 7]. Queries and keys must have
    the same order; their products do not depend on it.
    """
    rows = torch.arange(num_heads * head_dim, device="cpu").view(num_heads, head_dim)
    pairs = rows[:, :rotary_dim].view(num_heads, rotary_dim // 2, 2)
    return torch.cat((pairs.transpose(1, 2).flatten(1), rows[:, rotary_dim:]), dim=1).flatten()


def qkv_apart(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Returns the order of rows of a projection that gives, KV head by KV head, its queries, its key and its value.

    int64 [(num_heads + 2 * num_kv_heads) * head_dim]: all queries, all keys, all values.
    """
    queries = num_heads // num_kv_heads
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim, device="cpu")
    q, k, v = rows.view(num_kv_heads, queries + 2, head_dim).split((queries, 1, 1), dim=1)
    return torch.cat((q.flatten(), k.flatten(), v.flatten()))

"""Attention without a cache by torch's fused attention."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels import reference


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int,
) -> Tensor:
    """Computes `reference.encoder_attention`, by torch's fused attention per request."""
    output = torch.empty_like(query)
    bounds = query_start_loc.tolist()
    for start, end in pairwise(bounds):
        if start == end:
            continue
        rows, keys, values = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        mask = reference.near(end - start, window, query.device) if window > 0 else None
        result = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        output[start:end] = result[0].transpose(0, 1)
    return output

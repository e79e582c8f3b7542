"""The op state_scan in plain torch, many tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pagewire.kernels.reference import tokens_by_block

__all__ = ["state_scan"]

_PIECE = 64  # tokens that are computed together: with more, each costs more work but less of Python's time


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
    """Computes `reference.state_scan`, by the recurrence's closed form (arXiv 2405.21060, section 6): what token s adds
    to the state reaches token t times the decay between them."""
    output = torch.zeros_like(x, memory_format=torch.contiguous_format)
    steps = F.softplus(dt.float() + dt_bias).clamp(dt_min, dt_max)
    heads_per_group = x.shape[1] // b.shape[1]
    b, c = (part.float().repeat_interleave(heads_per_group, 1) for part in (b, c))
    for before, after, start, stop in tokens_by_block(block_table, query_start_loc, seq_lens, state_tokens):
        h = torch.zeros_like(state[after]) if before is None else state[before]
        for first in range(start, stop, _PIECE):
            piece = slice(first, min(first + _PIECE, stop))
            values, bs, cs = x[piece].float(), b[piece], c[piece]
            decays = (a * steps[piece]).cumsum(0).t()  # [heads, tokens], logarithms, from the state on
            between = (decays[:, :, None] - decays[:, None]).tril()  # [heads, t, s]
            added = values * steps[piece, :, None]
            scores = torch.einsum("thn,shn->hts", cs, bs) * between.exp().tril()
            y = torch.einsum("hts,shp->thp", scores, added)
            y += torch.einsum("thn,hpn->thp", cs, h) * decays.exp().t()[..., None]
            output[piece] = (y + d[:, None] * values).to(x.dtype)
            to_end = (decays[:, -1:] - decays).exp().t()[..., None]
            h = h * decays[:, -1].exp()[:, None, None] + torch.einsum("shp,shn->hpn", added * to_end, bs)
        state[after] = h
    return output

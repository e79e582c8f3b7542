"""Adapters (`pagewire.kernels.ops.adapters`)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def add_adapters(
    out: Tensor, x: Tensor, down: Tensor, up: Tensor, slots: Tensor, starts: Tensor, ranks: Tensor
) -> None:
    """Adds in fp32 and rounds once to out's dtype."""
    for slot, own in enumerate(ranks.tolist()):
        tokens = (slots == slot).nonzero().flatten()
        for part, (start, stop) in enumerate(pairwise(starts.tolist())):
            low = x[tokens].float() @ down[slot, part, : own[part]].float().T
            product = low @ up[slot, : own[part], start:stop].float()
            out[tokens, start:stop] = (out[tokens, start:stop].float() + product).to(out.dtype)

"""Sampling with temperature: truncation (min-p, top-k, top-p) and Gumbel-max with reproducible noise.

Noise is a pure function of (seed, position), so a token depends on its own logits alone: not on its neighbours in the
batch, on chunking, or on a restart in between.

Gumbel-max is used in two levels, which needs noise for G + 128 values per request in place of one per vocabulary
entry: the maximum over a group of `z_i + gumbel_i` is distributed as `logsumexp(z_group) + gumbel`. So first one of
the G groups of 128 neighbouring token ids is drawn by its logsumexp, then a token within it. The distribution is
softmax(z) exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GROUP_SIZE = 128

_NEGATIVE_INFINITY = float("-inf")


def _int64(value: int) -> int:
    """The two's complement reading of an unsigned 64-bit constant, as torch's int64 arithmetic wants it."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
_GOLDEN_GAMMA = _int64(0x9E3779B97F4A7C15)
_MIX_1 = _int64(0xBF58476D1CE4E5B9)
_MIX_2 = _int64(0x94D049BB133111EB)


@dataclass(frozen=True)
class RandomSampling:
    """The requests of a step that draw their token; a None column is off for all of them."""

    batch_indices: Tensor | None  # int64 [R], index into the sampled positions; None = all of them
    temperature: Tensor  # fp32 [R]
    seeds: Tensor  # int64 [R]
    positions: Tensor  # int64 [R], index in its sequence of the token to sample
    min_p: Tensor | None  # fp32 [R], 0 = off
    top_k: Tensor | None  # int64 [R], vocab_size = off
    max_top_k: int
    top_p: Tensor | None  # fp32 [R], 1 = off


def sample_random(logits: Tensor, params: RandomSampling) -> Tensor:
    """Token ids, int64 [R], for fp32 logits [R, vocab_size]."""
    scaled = logits / params.temperature[:, None]
    truncate(scaled, params)
    return gumbel_max(scaled, params.seeds, params.positions)


def truncate(scaled: Tensor, params: RandomSampling) -> None:
    """Leaves, in place, only the tokens that may be drawn; the others become -inf.

    Every rule is a lowest value that stays, so tokens of equal probability stay or go together.
    """
    cutoffs = []
    if params.min_p is not None:
        cutoffs.append(min_p_cutoff(scaled, params.min_p))
    if params.top_k is not None:
        cutoffs.append(top_k_cutoff(scaled, params.top_k, params.max_top_k))
    if cutoffs:
        _drop_below(scaled, cutoffs[0] if len(cutoffs) == 1 else torch.maximum(*cutoffs))
    if params.top_p is not None:
        # Of what the rules above left.
        _drop_below(scaled, top_p_cutoff(scaled, params.top_p))


def _drop_below(scaled: Tensor, cutoff: Tensor) -> None:
    scaled.masked_fill_(scaled < cutoff, _NEGATIVE_INFINITY)


def min_p_cutoff(scaled: Tensor, min_p: Tensor) -> Tensor:
    """[R, 1]: tokens at least min_p times as probable as the most probable one stay."""
    return scaled.amax(-1, keepdim=True) + min_p.log()[:, None]


def top_k_cutoff(scaled: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """[R, 1]: tokens at least as probable as the k-th most probable one stay."""
    largest = scaled.topk(max_top_k, dim=-1).values
    kth = largest.gather(-1, (top_k - 1).clamp(max=max_top_k - 1)[:, None])
    return kth.masked_fill_((top_k > max_top_k)[:, None], _NEGATIVE_INFINITY)


def top_p_cutoff(scaled: Tensor, top_p: Tensor) -> Tensor:
    """[R, 1]: the smallest set of most probable tokens with mass >= top_p stays, and ties with its last one."""
    highest = scaled.amax(-1, keepdim=True)
    log_mass = highest + _relative_weights(scaled, highest).sum(-1, keepdim=True).log_()
    ordered = _candidates(scaled, top_p, log_mass)  # [R, M], falling
    probs = (ordered - log_mass).exp_()
    # A token belongs to the set if what comes before it does not reach top_p; the first one always does.
    num_kept = ((probs.cumsum(-1) - probs) < top_p[:, None]).sum(-1, keepdim=True)
    cutoff = ordered.gather(-1, (num_kept - 1).clamp_(min=0))
    return cutoff.masked_fill_(top_p[:, None] >= 1, _NEGATIVE_INFINITY)


def _relative_weights(scaled: Tensor, highest: Tensor) -> Tensor:
    """exp(scaled - highest), but never below e^-80.

    That is too little to be drawn or to count; and exp() of -inf and of what underflows takes several times as long.
    """
    return (scaled - highest).clamp_(min=-80).exp_()


def _candidates(scaled: Tensor, top_p: Tensor, log_mass: Tensor) -> Tensor:
    """The values that may belong to the nucleus, falling, padded with -inf: [R, M].

    Tokens less probable than (1 - top_p) / vocab_size have less mass than 1 - top_p together, so the others contain the
    nucleus. On the CPU only those are sorted (hundreds, not 50,000); elsewhere the shape may not depend on values.
    """
    if scaled.device.type != "cpu":
        return scaled.sort(dim=-1, descending=True).values
    # Half of the bound leaves room for rounding.
    lowest = log_mass + ((1 - top_p).clamp(min=1e-30) / (2 * scaled.shape[-1])).log()[:, None]
    values, bounds = scaled.numpy(), lowest.numpy()
    rows = [
        np.sort(row[row >= bound])[::-1] if p < 1 else row[:1]
        for row, bound, p in zip(values, bounds, top_p.tolist(), strict=True)
    ]
    ordered = np.full((len(rows), max(1, *(len(row) for row in rows))), -np.inf, dtype=np.float32)
    for index, row in enumerate(rows):
        ordered[index, : len(row)] = row
    return torch.from_numpy(ordered)


def gumbel_max(scaled: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draws from softmax(scaled) [R, vocab_size]: int64 [R]. The same (seed, position, row) gives the same token."""
    vocab_size = scaled.shape[-1]
    padding = -vocab_size % GROUP_SIZE
    if padding:
        scaled = torch.nn.functional.pad(scaled, (0, padding), value=_NEGATIVE_INFINITY)
    groups = scaled.unflatten(-1, (-1, GROUP_SIZE))  # [R, G, GROUP_SIZE]
    num_groups = groups.shape[1]
    noise = gumbel_noise(seeds, positions, num_groups + GROUP_SIZE)
    highest = scaled.amax(-1, keepdim=True)[..., None]
    group_scores = _relative_weights(groups, highest).sum(-1).log_()  # [R, G]
    group = (group_scores + noise[:, :num_groups]).argmax(-1)
    members = groups.gather(1, group[:, None, None].expand(-1, 1, GROUP_SIZE)).squeeze(1)
    member = (members + noise[:, num_groups:]).argmax(-1)
    return group * GROUP_SIZE + member


def gumbel_noise(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """fp32 [R, count] of standard Gumbel noise, a pure function of (seed, position, column).

    SplitMix64 as a counter-based generator: the key of a (seed, position) is two rounds of its finalizer, the columns
    are the stream from there. Integer arithmetic wraps alike on every device.
    """
    keys = _mix(_mix(seeds * _GOLDEN_GAMMA + _GOLDEN_GAMMA) + positions * _GOLDEN_GAMMA)
    columns = torch.arange(1, count + 1, dtype=torch.int64, device=seeds.device)
    bits = _mix(keys[:, None] + columns * _GOLDEN_GAMMA)
    # 52 random bits and a half: never 0, never 1, exact in fp64.
    uniform = (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_().float()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)

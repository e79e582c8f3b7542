"""The float sampling parameters that kernels read, and their effect on logits: shared by all sampling code.

The parameters of all requests are a matrix `floats`, fp32 [len(FloatParameter), max_num_seqs]. For a new one, add its
line here and what it does to the logits: below, or in the ops. No signature changes.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

__all__ = ["FloatParameter", "kept", "processed_logits"]

_NEGATIVE_INFINITY = float("-inf")


class FloatParameter(enum.IntEnum):
    """Rows of the matrix, by the names in upper case of the fields of SamplingParams."""

    TEMPERATURE = 0  # 0 = the most probable token
    TOP_P = 1  # 1 = off
    MIN_P = 2  # 0 = off
    REPETITION_PENALTY = 3  # 1 = off; see `ops.apply_penalties`, as the next two
    PRESENCE_PENALTY = 4  # 0 = off
    FREQUENCY_PENALTY = 5  # 0 = off


def kept(logits: Tensor, floats: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Divides by the temperature, and finds what min-p and top-k keep: where rejection sampling for top-p begins.

    logits [L, vocab_size], floats fp32 [len(FloatParameter), L] and top_k int64 [L] of positions with a temperature
    above 0. Returns the scaled logits fp32 [L, vocab_size] and the least that is kept of each, fp32 [L, 1].
    """
    # Times the reciprocal, rounded once: the same fp32 values, and so the same ties, on every device.
    scaled = logits.float() * floats[FloatParameter.TEMPERATURE].reciprocal()[:, None]
    falling = scaled.sort(dim=-1, descending=True).values
    least = falling.gather(1, top_k[:, None] - 1)
    return scaled, torch.maximum(least, falling[:, :1] + floats[FloatParameter.MIN_P].log()[:, None])


def processed_logits(logits: Tensor, sampled: Tensor, floats: Tensor, top_k: Tensor) -> Tensor:
    """Returns what `ops.sample_tokens` samples from: fp32 [L, vocab_size], -inf for tokens that are left out.

    Arguments as of `kept`; where the temperature is 0, logits stay as they are. sampled int64 [L] are never left out,
    although the sums that top-p compares are rounded in another order here.
    """
    is_random = floats[FloatParameter.TEMPERATURE] > 0
    with_divisor = floats.clone()
    with_divisor[FloatParameter.TEMPERATURE].masked_fill_(~is_random, 1.0)
    scaled, least = kept(logits, with_divisor, top_k)
    falling = scaled.sort(dim=-1, descending=True).values
    probs = falling.masked_fill(falling < least, _NEGATIVE_INFINITY).softmax(-1)
    top_p = floats[FloatParameter.TOP_P][:, None]
    nucleus_size = (probs.cumsum(-1) - probs < top_p).sum(-1, keepdim=True)
    nucleus = falling.gather(1, nucleus_size.clamp(min=1) - 1)
    least = torch.where(top_p < 1, torch.maximum(least, nucleus), least)
    least = torch.minimum(least, scaled.gather(1, sampled[:, None]))
    return scaled.masked_fill(is_random[:, None] & (scaled < least), _NEGATIVE_INFINITY)

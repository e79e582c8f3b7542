"""The choice of the next token (`pagewire.kernels.ops.sampling`).

A token is a pure function of its own logits, its request's parameters, the seed and its position: not of its
neighbours in the batch, of chunking, or of a restart in between.

Drawing uses Gumbel-max in two levels, which needs noise for G + 128 values per request in place of one per vocabulary
entry: the maximum over a group of `z_i + gumbel_i` is distributed as `logsumexp(z_group) + gumbel`. So first one of
the G groups of 128 neighbouring token ids is drawn by its logsumexp, then a token within it. The distribution is
softmax(z) exactly.

Nucleus (top-p) sampling needs no sort: a token is drawn from all that min-p and top-k leave. If it belongs to the
nucleus it is taken; if not, the nucleus consists of more probable tokens only, and the next round draws, with fresh
noise, among those. That is rejection sampling, so the distribution is exact, and with top_p = 0.9 nine draws of ten
are taken at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.kernels.sampling_parameters import FloatParameter, kept

GROUP_SIZE = 128
NOT_A_NUMBER = -1  # in place of a token: the logits have NaN

_NEGATIVE_INFINITY = float("-inf")


def _int64(value: int) -> int:
    """The two's complement reading of an unsigned 64-bit constant, as torch's int64 arithmetic wants it."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)
_GOLDEN_GAMMA = _int64(0x9E3779B97F4A7C15)
_MIX_1 = _int64(0xBF58476D1CE4E5B9)
_MIX_2 = _int64(0x94D049BB133111EB)


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    floats: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    offsets: Tensor | None,
) -> Tensor:
    sampled = logits.float().argmax(-1)
    is_broken = logits.isnan().any(-1)
    sampled[is_broken] = NOT_A_NUMBER
    for s, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        position = num_tokens[row] if offsets is None else num_tokens[row] + offsets[s]
        if floats[FloatParameter.TEMPERATURE, row] > 0 and not is_broken[s]:
            sampled[s] = _draw(logits[s], floats[:, row], top_k[row], seeds[row], position)
        if offsets is None:
            token_ids[row, position] = sampled[s].clamp(min=0)  # it is the next step's input
            num_tokens[row] += 1
    return sampled


def _draw(logits: Tensor, floats: Tensor, top_k: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Returns a token id for the logits [vocab_size] of one request; floats fp32 [len(FloatParameter)]."""
    (scaled,), (least,) = kept(logits[None], floats[:, None], top_k[None])
    keep, top_p = scaled >= least, floats[FloatParameter.TOP_P]
    probs = scaled.masked_fill(~keep, _NEGATIVE_INFINITY).softmax(-1)
    draw = 0
    while True:
        token = gumbel_max(scaled.masked_fill(~keep, _NEGATIVE_INFINITY), seed, position, draw)
        more_probable = keep & (scaled > scaled[token])
        if top_p >= 1 or not more_probable.any() or probs[more_probable].sum() < top_p:
            return token
        keep = more_probable
        draw += 1


def gumbel_max(scaled: Tensor, seed: Tensor, position: Tensor, draw: int) -> Tensor:
    """Draws from softmax(scaled) [vocab_size], with the noise of the draw-th attempt."""
    padding = -scaled.shape[0] % GROUP_SIZE
    groups = torch.nn.functional.pad(scaled, (0, padding), value=_NEGATIVE_INFINITY).view(-1, GROUP_SIZE)
    num_groups = groups.shape[0]
    noise = gumbel_noise(seed, position, draw, num_groups + GROUP_SIZE)
    group = (groups.logsumexp(-1) + noise[:num_groups]).argmax()
    return group * GROUP_SIZE + (groups[group] + noise[num_groups:]).argmax()


def gumbel_noise(seed: Tensor, position: Tensor, draw: int, count: int) -> Tensor:
    """Returns fp32 [count] of standard Gumbel noise, a pure function of (seed, position, draw, column).

    SplitMix64 as a counter-based generator: the key of a (seed, position) is two rounds of its finalizer, the columns
    are the stream from there, `count` of them for each draw. Integer arithmetic wraps alike on every device.
    """
    key = _mix(_mix(seed * _GOLDEN_GAMMA + _GOLDEN_GAMMA) + position * _GOLDEN_GAMMA)
    columns = torch.arange(1, count + 1, dtype=torch.int64, device=seed.device) + draw * count
    bits = _mix(key + columns * _GOLDEN_GAMMA)
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


def apply_penalties(
    logits: Tensor,
    batch_indices: Tensor,
    rows: Tensor,
    floats: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    offsets: Tensor | None,
) -> None:
    drafted = [0] * len(rows) if offsets is None else offsets.tolist()
    for index, row, offset in zip(batch_indices.tolist(), rows.tolist(), drafted, strict=True):
        known = token_ids[row, : int(num_tokens[row]) + offset].long()
        output = known[int(num_prompt_tokens[row]) :]
        seen, values = known.unique(), logits[index]
        repetition = floats[FloatParameter.REPETITION_PENALTY, row]
        presence = floats[FloatParameter.PRESENCE_PENALTY, row]
        frequency = floats[FloatParameter.FREQUENCY_PENALTY, row]
        values[seen] = torch.where(values[seen] > 0, values[seen] / repetition, values[seen] * repetition)
        counts = torch.bincount(output, minlength=logits.shape[-1])
        values -= frequency * counts + presence * (counts > 0)


def mask_tokens(logits: Tensor, batch_indices: Tensor, masks: Tensor) -> None:
    vocab_size = logits.shape[1]
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    is_masked = bits.flatten(1)[:, :vocab_size] == 0
    indices = batch_indices.long()
    logits[indices] = logits[indices].masked_fill(is_masked, _NEGATIVE_INFINITY)


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    logits, chosen = logits.float(), token_ids[:, None]
    chosen_logits = logits.gather(-1, chosen)
    ranks = (logits > chosen_logits).sum(-1) + 1
    top_logits, top_ids = (part[:, :num_top] for part in logits.sort(dim=-1, descending=True, stable=True))
    logprobs = torch.cat([chosen_logits, top_logits], dim=-1) - logits.logsumexp(-1, keepdim=True)
    return torch.cat([chosen, top_ids], dim=-1), logprobs, ranks

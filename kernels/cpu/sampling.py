"""The sampling ops on the CPU, all rows at once, the way of the Triton kernels (`kernels.sampling`).

torch passes over the logits once, for the maximum of each group of 128 token ids; what is asked next concerns few
groups, which are gathered. Its argmax and topk over a whole vocabulary cost ten times as much as that pass. What is
small is numpy's, whose calls cost less.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from kernels.reference_sampling import GROUP_SIZE

_INF = np.float32(np.inf)
# SplitMix64, as in the reference; unsigned integers wrap and shift as it wants them
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def sample_tokens(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
) -> Tensor:
    """As `reference.sample_tokens`."""
    row = rows.numpy()
    is_live, is_random = row >= 0, temperature.numpy()[row] > 0
    positions, sampled = num_tokens.numpy(), np.zeros(len(row), dtype=np.int64)
    greedy, random = (is_live & ~is_random).nonzero()[0], (is_live & is_random).nonzero()[0]
    if len(greedy):
        sampled[greedy] = _most_probable(_select(logits, greedy))
    if len(random):
        drawn = row[random]
        sampled[random] = _draw(
            _select(logits, random),
            temperature.numpy()[drawn],
            top_k.numpy()[drawn],
            top_p.numpy()[drawn],
            min_p.numpy()[drawn],
            seeds.numpy()[drawn],
            positions[drawn],
        )
    row = row[is_live]
    token_ids.numpy()[row, positions[row]] = sampled[is_live]
    positions[row] += 1
    return torch.from_numpy(sampled)


def _select(logits: Tensor, lines: np.ndarray) -> Tensor:
    return logits if len(lines) == len(logits) else logits[torch.from_numpy(lines)]


def _grouped(logits: Tensor) -> Tensor:
    """[S, vocab_size] -> [S, num_groups, GROUP_SIZE], filled up with -inf."""
    padding = -logits.shape[1] % GROUP_SIZE
    if padding:
        logits = torch.nn.functional.pad(logits, (0, padding), value=float("-inf"))
    return logits.unflatten(1, (-1, GROUP_SIZE))


def _most_probable(logits: Tensor) -> np.ndarray:
    groups = _grouped(logits)
    group = groups.amax(-1).float().numpy().argmax(-1)
    members = groups[torch.arange(len(groups)), torch.from_numpy(group)]
    return group * GROUP_SIZE + members.float().numpy().argmax(-1)


# log(0) = -inf is meant; a broken model's logits may be NaN or inf.
@np.errstate(divide="ignore", invalid="ignore")
def _draw(
    logits: Tensor,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """Token ids int64 [R] of random rows, in rounds: those whose draw is rejected draw again in the next."""
    scaled = logits * torch.from_numpy(1 / temperature)[:, None]  # fp32, whatever the logits are
    tensor = _grouped(scaled)
    groups, maxima = tensor.numpy(), tensor.amax(-1).numpy()  # [R, num_groups, GROUP_SIZE], [R, num_groups]
    num_groups = maxima.shape[1]
    highest = maxima.max(-1)
    origin = np.where(np.isfinite(highest), highest, np.float32(0))  # subtracted before exp()
    lowest = _lowest_kept(groups, maxima, highest, top_k, min_p, scaled.shape[1])
    left = np.arange(len(groups))  # rows still to be decided; what follows is of these
    if (lowest > -_INF).any():
        sums = _masses(groups, left, maxima >= lowest[:, None], lowest, origin)
    else:
        sums = _weights(tensor, origin[:, None, None])
    needed = np.where(top_p < 1, top_p * sums.sum(-1), _INF)  # of the mass, for a nucleus
    keys = _mix(
        _mix(seeds.astype(np.uint64) * _GOLDEN_GAMMA + _GOLDEN_GAMMA) + positions.astype(np.uint64) * _GOLDEN_GAMMA
    )
    tokens = np.empty(len(groups), dtype=np.int64)
    for draw in itertools.count():
        noise = _gumbel_noise(keys, draw, num_groups + GROUP_SIZE)
        group = (np.log(sums) + noise[:, :num_groups]).argmax(-1)
        members = groups[left, group]
        noisy = np.where(members >= lowest[:, None], members + noise[:, num_groups:], -_INF)
        member = noisy.argmax(-1)
        tokens[left] = group * GROUP_SIZE + member
        # What is more probable decides whether the token is in the nucleus; if not, it is what is left.
        value = members[np.arange(len(left)), member]
        above = (maxima > value[:, None]) & (needed < _INF)[:, None]
        if not above.any():
            break
        lowest = np.nextafter(value, _INF)
        sums = _masses(groups, left, above, lowest, origin)
        rejected = (above.any(-1) & (sums.sum(-1) >= needed)).nonzero()[0]
        if not len(rejected):
            break
        left, maxima, origin, lowest, needed = (x[rejected] for x in (left, maxima, origin, lowest, needed))
        sums, keys = sums[rejected], keys[rejected]
    return tokens


def _weights(values: Tensor, origin: np.ndarray) -> np.ndarray:
    """[..., num]: sums over the last dimension of exp(values - origin), but of e^-80 where that is less.

    That is too little to be drawn or to count; and exp() of -inf and of what underflows takes several times as long.
    """
    return (values - torch.from_numpy(origin)).clamp_(min=-80).exp_().sum(-1).numpy()


def _masses(
    groups: np.ndarray, left: np.ndarray, wanted: np.ndarray, lowest: np.ndarray, origin: np.ndarray
) -> np.ndarray:
    """[L, num_groups]: the sum of weights of tokens >= lowest [L] in the wanted [L, num_groups] groups of rows left."""
    line, group = wanted.nonzero()
    values = groups[left[line], group]
    values[values < lowest[line, None]] = -_INF
    sums = np.zeros(wanted.shape, dtype=np.float32)
    sums[line, group] = _weights(torch.from_numpy(values), origin[line, None])
    return sums


def _gumbel_noise(keys: np.ndarray, draw: int, count: int) -> np.ndarray:
    """fp32 [L, count], as `reference.gumbel_noise` for the keys [L] of (seed, position)."""
    columns = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(draw * count)
    bits = _mix(keys[:, None] + columns * _GOLDEN_GAMMA)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return (-np.log(-np.log(uniform))).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _lowest_kept(
    groups: np.ndarray, maxima: np.ndarray, highest: np.ndarray, top_k: np.ndarray, min_p: np.ndarray, vocab_size: int
) -> np.ndarray:
    """fp32 [R]: the lowest value that min-p and top-k leave; -inf = all."""
    lowest = np.where(min_p > 0, highest + np.log(min_p), -_INF)
    limited = ((top_k < vocab_size) & ~np.isnan(highest)).nonzero()[0]
    if len(limited):
        kth = _kth_largest(groups, maxima[limited], limited, top_k[limited])
        lowest[limited] = np.maximum(lowest[limited], kth)
    return lowest


def _kth_largest(groups: np.ndarray, maxima: np.ndarray, lines: np.ndarray, k: np.ndarray) -> np.ndarray:
    """fp32 [L]: the k-th largest value of each row groups[lines], whose group maxima are [L, num_groups].

    At least k values are as large as the k-th largest maximum: little more than k have to be sorted.
    """
    num_groups, every = maxima.shape[1], np.arange(len(lines))
    ordered = np.sort(maxima, axis=1)
    bound = np.where(k <= num_groups, ordered[every, num_groups - np.minimum(k, num_groups)], -_INF)
    line, group = (maxima >= bound[:, None]).nonzero()
    values = groups[lines[line], group]
    hit, member = (values >= bound[line, None]).nonzero()
    line, values = line[hit], values[hit, member]
    counts = np.bincount(line, minlength=len(lines))
    place = np.arange(len(line)) - (counts.cumsum() - counts)[line]
    candidates = np.full((len(lines), counts.max()), -_INF, dtype=np.float32)
    candidates[line, place] = values
    candidates.sort(axis=1)
    return candidates[every, candidates.shape[1] - k]


def apply_penalties(
    logits: Tensor,
    batch_indices: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_prompt_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """As `reference.apply_penalties`."""
    row = rows.long()
    lengths = num_tokens[row, None]
    known = token_ids[row, : int(lengths.max())].long()  # [P, max num_tokens]
    positions = torch.arange(known.shape[1])
    is_known = positions < lengths
    is_output = is_known & (positions >= num_prompt_tokens[row, None])
    # What lies past a row's end is stale: it stands for the row's first token and counts nothing.
    known = torch.where(is_known, known, known[:, :1])
    counts = torch.zeros(len(row), logits.shape[1])
    num_output = counts.scatter_add_(1, known, is_output.float()).gather(1, known)  # [P, max num_tokens]

    # Only known tokens change. One that occurs n times is written n times, with the same value.
    where = (batch_indices.long()[:, None], known)
    values = logits[where]
    values = torch.where(values > 0, values / repetition[row, None], values * repetition[row, None])
    values -= frequency[row, None] * num_output + presence[row, None] * (num_output > 0)
    logits[where] = values


def token_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.token_logprobs`."""
    logits, chosen = logits.float(), token_ids[:, None]
    chosen_logits = logits.gather(-1, chosen)
    ranks = (logits > chosen_logits).sum(-1) + 1
    top_ids = _most_probable_ids(logits, num_top) if num_top else chosen[:, :0]
    ids = torch.cat([chosen, top_ids], dim=-1)
    return ids, logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True), ranks


def _most_probable_ids(logits: Tensor, num_top: int) -> Tensor:
    """int64 [L, num_top], falling; of equals the lowest id first, which topk does not promise."""
    groups = _grouped(logits)
    maxima = groups.amax(-1)
    if maxima.isnan().any():
        return _most_probable_ids(
            logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")), num_top
        )
    lines = np.arange(len(logits))
    lowest = _kth_largest(groups.numpy(), maxima.numpy(), lines, np.full(len(logits), num_top))
    line, group = (maxima.numpy() >= lowest[:, None]).nonzero()
    values = groups.numpy()[line, group]
    hit, member = (values >= lowest[line, None]).nonzero()
    line, values, ids = line[hit], values[hit, member], group[hit] * GROUP_SIZE + member
    # The padding behind the vocabulary is -inf, and last: it is never among the first num_top <= vocab_size.
    order = np.lexsort((ids, -values, line))
    counts = np.bincount(line, minlength=len(logits))
    first = counts.cumsum() - counts
    return torch.from_numpy(ids[order[first[:, None] + np.arange(num_top)]])

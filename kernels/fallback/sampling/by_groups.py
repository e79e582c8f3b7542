"""The sampling ops on the CPU, all rows at once, in the way of the Triton kernels (`kernels/triton/sampling`).

Only `TokenGroups` reads whole vocabularies: once for the maximum of each group of 128 token ids, and at most once a
round for the masses of groups that matter. The rest is small and done in numpy, without OpenMP's synchronization.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire.kernels.reference.sampling import GROUP_SIZE, NOT_A_NUMBER
from pagewire.kernels.sampling_parameters import FloatParameter

_INF = np.float32(np.inf)
# SplitMix64, as in the reference; unsigned integers wrap and shift as required
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class TokenGroups(Protocol):
    """L lines of logits, times a scale each, in groups of GROUP_SIZE token ids; the last is filled up with -inf.

    In C++ (`kernels.cpu.sampling.token_groups`) and in torch (`sampling`). Values are fp32; indices int64.
    """

    maxima: np.ndarray
    """[L, num_groups]; NaN of a group that has one"""

    def masses(self, line: np.ndarray, lowest: np.ndarray, origin: np.ndarray) -> np.ndarray:
        """Returns [N, num_groups]: the sums of exp(value - origin [N]) over values >= lowest [N] of the lines line [N].

        0 for a group with NaN.
        """
        ...

    def num_above(self, bound: np.ndarray) -> np.ndarray:
        """Returns int64 [L]: how many values are greater than bound [L], groups with NaN left out."""
        ...

    def members(self, line: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Returns [N, GROUP_SIZE]: the values of the groups group [N] of the lines line [N]."""
        ...


# Of logits [S, vocab_size], lines int64 [L] of them, and scales fp32 [L]
MakeGroups = Callable[[Tensor, np.ndarray, np.ndarray], TokenGroups]


def sample_by_groups(
    make_groups: MakeGroups,
    logits: Tensor,
    rows: Tensor,
    floats: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    offsets: Tensor | None,
) -> Tensor:
    """Computes `reference.sample_tokens`."""
    row, sampled = rows.numpy(), np.zeros(len(rows), dtype=np.int64)
    greedy = ((row >= 0) & ~(floats.numpy()[FloatParameter.TEMPERATURE, row] > 0)).nonzero()[0]
    if len(greedy):
        tokens = _most_probable(make_groups(logits, greedy, np.ones(len(greedy), dtype=np.float32)))
        _give(tokens, greedy, row, token_ids, num_tokens, offsets, sampled)
    columns = (floats, top_k, seeds, token_ids, num_tokens, offsets)
    sample_random(make_groups, logits, rows, *columns, sampled)
    return torch.from_numpy(sampled)


def sample_random(
    make_groups: MakeGroups,
    logits: Tensor,
    rows: Tensor,
    floats: Tensor,
    top_k: Tensor,
    seeds: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    offsets: Tensor | None,
    sampled: np.ndarray,
) -> None:
    """Computes `reference.sample_tokens` where temperature is above 0; writes the tokens to sampled int64 [S]."""
    row = rows.numpy()
    temperature = floats.numpy()[FloatParameter.TEMPERATURE, row]
    random = ((row >= 0) & (temperature > 0)).nonzero()[0]
    if not len(random):
        return
    drawn = row[random]
    positions = num_tokens.numpy()[drawn]
    if offsets is not None:
        positions = positions + offsets.numpy()[random]
    tokens = _draw(
        make_groups(logits, random, 1 / temperature[random]),
        logits.shape[1],
        floats.numpy()[:, drawn],
        top_k.numpy()[drawn],
        seeds.numpy()[drawn],
        positions,
    )
    _give(tokens, random, row, token_ids, num_tokens, offsets, sampled)


def _give(
    tokens: np.ndarray,
    batch_indices: np.ndarray,
    row: np.ndarray,
    token_ids: Tensor,
    num_tokens: Tensor,
    offsets: Tensor | None,
    sampled: np.ndarray,
) -> None:
    """Writes to sampled and, unless there are drafts, to the rows of these batch indices."""
    sampled[batch_indices] = tokens
    if offsets is not None:
        return
    row, positions = row[batch_indices], num_tokens.numpy()
    token_ids.numpy()[row, positions[row]] = np.maximum(tokens, 0)
    positions[row] += 1


def _most_probable(groups: TokenGroups) -> np.ndarray:
    group = groups.maxima.argmax(-1)
    tokens = group * GROUP_SIZE + groups.members(np.arange(len(group)), group).argmax(-1)
    tokens[np.isnan(groups.maxima.max(-1))] = NOT_A_NUMBER
    return tokens


# log(0) = -inf is intended; a broken model's logits may be NaN or inf.
@np.errstate(divide="ignore", invalid="ignore")
def _draw(
    groups: TokenGroups,
    vocab_size: int,
    floats: np.ndarray,
    top_k: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> np.ndarray:
    """Returns token ids int64 [R] of random rows; floats fp32 [len(FloatParameter), R]. Where a draw is rejected, the
    next round draws again."""
    num_rows, num_groups = groups.maxima.shape
    highest = groups.maxima.max(-1)
    origin = _exp_origin(highest)
    lowest, top_p = _lowest_kept(groups, highest, floats, top_k, vocab_size), floats[FloatParameter.TOP_P]
    left = np.arange(num_rows)  # undecided rows; the arrays below are for these
    masses = groups.masses(left, lowest, origin)
    needed = np.where(top_p < 1, top_p * masses.sum(-1), _INF)  # of the mass, for a nucleus
    keys = _mix(
        _mix(seeds.astype(np.uint64) * _GOLDEN_GAMMA + _GOLDEN_GAMMA) + positions.astype(np.uint64) * _GOLDEN_GAMMA
    )
    tokens = np.empty(num_rows, dtype=np.int64)
    for draw in itertools.count():
        noise = _gumbel_noise(keys, draw, num_groups + GROUP_SIZE)
        group = (np.log(masses) + noise[:, :num_groups]).argmax(-1)
        members = groups.members(left, group)
        noisy = np.where(members >= lowest[:, None], members + noise[:, num_groups:], -_INF)
        member = noisy.argmax(-1)
        tokens[left] = group * GROUP_SIZE + member
        # The mass of more probable tokens decides whether the token is in the nucleus; if not, only these are left.
        value = members[np.arange(len(left)), member]
        unsure = ((needed < _INF) & (highest[left] > value)).nonzero()[0]
        if not len(unsure):
            break
        lowest = np.nextafter(value, _INF)
        masses = groups.masses(left[unsure], lowest[unsure], origin[left[unsure]])
        is_rejected = masses.sum(-1) >= needed[unsure]
        rejected, masses = unsure[is_rejected], masses[is_rejected]
        if not len(rejected):
            break
        left, lowest, needed, keys = left[rejected], lowest[rejected], needed[rejected], keys[rejected]
    tokens[np.isnan(highest)] = NOT_A_NUMBER
    return tokens


def _exp_origin(highest: np.ndarray) -> np.ndarray:
    """Subtracted before exp()."""
    return np.where(np.isfinite(highest), highest, np.float32(0))


def _gumbel_noise(keys: np.ndarray, draw: int, count: int) -> np.ndarray:
    """fp32 [L, count], as `reference_sampling.gumbel_noise` for the keys [L] of (seed, position)."""
    columns = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(draw * count)
    bits = _mix(keys[:, None] + columns * _GOLDEN_GAMMA)
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return (-np.log(-np.log(uniform))).astype(np.float32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def _lowest_kept(
    groups: TokenGroups, highest: np.ndarray, floats: np.ndarray, top_k: np.ndarray, vocab_size: int
) -> np.ndarray:
    """Returns fp32 [R], the lowest value that min-p and top-k keep; -inf = all (`sampling_parameters.kept`)."""
    min_p = floats[FloatParameter.MIN_P]
    lowest = np.where(min_p > 0, highest + np.log(min_p), -_INF)
    limited = ((top_k < vocab_size) & ~np.isnan(highest)).nonzero()[0]
    if len(limited):
        kth = _kth_largest(groups, limited, top_k[limited])
        lowest[limited] = np.maximum(lowest[limited], kth)
    return lowest


def _kth_largest(groups: TokenGroups, lines: np.ndarray, k: np.ndarray) -> np.ndarray:
    """fp32 [L]: the k-th largest value of each of the lines.

    At least k values are as large as the k-th largest maximum: little more than k must be sorted.
    """
    maxima = groups.maxima[lines]
    num_groups, every = maxima.shape[1], np.arange(len(lines))
    ordered = np.sort(maxima, axis=1)
    bound = np.where(k <= num_groups, ordered[every, num_groups - np.minimum(k, num_groups)], -_INF)
    line, _, values = _at_least(groups, lines, bound)
    counts = np.bincount(line, minlength=len(lines))
    place = np.arange(len(line)) - (counts.cumsum() - counts)[line]
    candidates = np.full((len(lines), counts.max()), -_INF, dtype=np.float32)
    candidates[line, place] = values
    candidates.sort(axis=1)
    return candidates[every, candidates.shape[1] - k]


def _at_least(groups: TokenGroups, lines: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns all values >= bound [L] of the lines [L]: indices of lines, token ids, values; by line, ascending ids."""
    line, group = (groups.maxima[lines] >= bound[:, None]).nonzero()
    members = groups.members(lines[line], group)
    hits = np.flatnonzero(members >= bound[line, None])  # far quicker than nonzero() of two dimensions
    hit = hits // GROUP_SIZE
    return line[hit], group[hit] * GROUP_SIZE + hits % GROUP_SIZE, members.ravel()[hits]


@np.errstate(divide="ignore", invalid="ignore")
def logprobs_by_groups(
    make_groups: MakeGroups, logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `reference.token_logprobs`."""
    lines, ones = np.arange(len(logits)), np.ones(len(logits), dtype=np.float32)
    groups = make_groups(logits, lines, ones)
    chosen = token_ids.numpy()
    chosen_logits = groups.members(lines, chosen // GROUP_SIZE)[lines, chosen % GROUP_SIZE]
    ranks = groups.num_above(chosen_logits) + 1

    highest = groups.maxima.max(-1)
    origin = _exp_origin(highest)
    log_mass = np.log(groups.masses(lines, np.full(len(lines), -_INF), origin).sum(-1))
    logsumexp = np.where(np.isfinite(highest), origin + log_mass, highest)

    if np.isnan(highest).any():
        groups = make_groups(
            logits.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")), lines, ones
        )
    top_ids, top_logits = _largest(groups, lines, num_top)
    ids = np.concatenate([chosen[:, None], top_ids], axis=1)
    logprobs = np.concatenate([chosen_logits[:, None], top_logits], axis=1) - logsumexp[:, None]
    return torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(ranks)


def _largest(groups: TokenGroups, lines: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids int64 [L, count] and values fp32 [L, count], descending; equals by ascending id. No NaN."""
    if count == 0:
        return np.empty((len(lines), 0), dtype=np.int64), np.empty((len(lines), 0), dtype=np.float32)
    line, ids, values = _at_least(groups, lines, _kth_largest(groups, lines, np.full(len(lines), count)))
    # The padding behind the vocabulary is -inf, and last: it is never among the first count <= vocab_size.
    order = np.lexsort((ids, -values, line))
    counts = np.bincount(line, minlength=len(lines))
    first = order[(counts.cumsum() - counts)[:, None] + np.arange(count)]
    return ids[first], values[first]

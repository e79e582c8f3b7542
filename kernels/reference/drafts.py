"""Drafted tokens (`pagewire.kernels.ops.drafts`). Suffix decoding is in numpy: it is for the host."""

from __future__ import annotations

import numpy as np
from torch import Tensor

_MOST_PLACES = 128  # in one text, the latest
_END = -1  # behind each text; no token
_NO_PLACES = np.empty(0, dtype=np.int64)


def accept_tokens(
    sampled: Tensor,
    rows: Tensor,
    sample_start_loc: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed_tokens: Tensor,
    num_gained: Tensor,
) -> None:
    starts = sample_start_loc.tolist()
    for b, row in enumerate(rows.tolist()):
        tokens = sampled[starts[b] : starts[b + 1]]
        if row < 0 or not len(tokens):
            num_gained[b] = 0
            continue
        known = int(num_tokens[row])
        is_right = token_ids[row, known : known + len(tokens) - 1] == tokens[:-1]
        gained = int(is_right.long().cumprod(0).sum()) + 1
        token_ids[row, known : known + gained] = tokens[:gained].int().clamp(min=0)
        num_tokens[row] += gained
        num_computed_tokens[row] -= len(tokens) - gained
        num_gained[b] = gained


def look_up_drafts(
    rows: Tensor,
    num_wanted: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_found: Tensor,
    longest: int,
    shortest: int,
) -> None:
    for b, row in enumerate(rows.tolist()):
        known, wanted = int(num_tokens[row]), int(num_wanted[b])
        text = token_ids[row, :known].tolist()
        start, found = known - 1, 0  # of what is repeated
        for length in range(min(longest, known - 1), shortest - 1, -1):
            places = [at for at in range(known - length) if text[at : at + length] == text[known - length :]]
            if places:
                start, found = places[-1] + length, min(wanted, 2 * length)
                break
        for index in range(wanted):
            token_ids[row, known + index] = text[start + index % (known - start)]
        num_found[b] = found


def draft_by_suffix(
    rows: Tensor,
    num_wanted: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    others: Tensor,
    num_found: Tensor,
    max_depth: int,
    factor: float,
    min_share: float,
) -> None:
    for b, row in enumerate(rows.tolist()):
        known = int(num_tokens[row])
        text = of_text = token_ids[row, :known].numpy()
        starts, length = places(text, text, max_depth)
        of_others, longest = places(others.numpy(), text, max_depth)
        if longest > length:
            of_text, starts, length = others.numpy(), of_others, longest
        wanted = min(int(num_wanted[b]), max(1, int(np.float32(factor) * np.float32(length))))
        draft = vote(of_text, starts, wanted, min_share) if length else []
        token_ids[row, known : known + len(draft)] = token_ids.new_tensor(draft)
        num_found[b] = len(draft)


def places(text: np.ndarray, ended: np.ndarray, max_depth: int) -> tuple[np.ndarray, int]:
    """Returns where text int32 [n] goes on behind the last tokens of another one [m], or the same: int64 [p], those
    with most tokens in common; and how many these are, 2 to max_depth. None: [0], 0."""
    if len(text) < 3 or len(ended) < 2:
        return _NO_PLACES, 0
    # What would follow must be there.
    starts = np.flatnonzero((text[1:-1] == ended[-1]) & (text[:-2] == ended[-2])) + 2
    if not len(starts):
        return _NO_PLACES, 0
    starts = starts[-_MOST_PLACES:]
    depth = min(max_depth, len(ended))
    back = np.arange(1, depth + 1)
    at = starts[:, None] - back
    is_same = (text[np.maximum(at, 0)] == ended[-back]) & (at >= 0)
    common = np.where(is_same.all(1), depth, is_same.argmin(1))
    longest = int(common.max())
    return starts[common == longest], longest


def vote(text: np.ndarray, starts: np.ndarray, count: int, min_share: float) -> list[int]:
    """Returns at most count tokens: the most frequent of what follows each start in a text, token by token, as long as
    so large a share of all goes on like this. Of equally frequent ones, the lowest id, so that all ranks agree."""
    at = starts[:, None] + np.arange(count)
    followers = np.where(at < len(text), text[np.minimum(at, len(text) - 1)], _END)
    fewest = np.float32(min_share) * np.float32(len(starts))
    draft: list[int] = []
    for index in range(count):
        tokens = followers[:, index]
        values, counts = np.unique(tokens[tokens != _END], return_counts=True)
        if not len(values):
            break
        token = int(values[counts.argmax()])
        followers = followers[tokens == token]
        if len(followers) < fewest:
            break
        draft.append(token)
    return draft

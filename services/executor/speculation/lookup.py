"""Where a text has had its last few tokens before."""

from __future__ import annotations

import numpy as np

_NOTHING = np.empty(0, dtype=np.int32)
_NOWHERE = np.empty(0, dtype=np.int64)


def continuation(tokens: np.ndarray, longest: int, shortest: int, count: int) -> np.ndarray:
    """int32 [count]: what followed where tokens [n] had their last `longest` tokens before, or fewer, but no fewer than
    `shortest`; [0] if they never did. The latest place of those with most tokens in common counts. What runs into the
    end goes on from that place, as a text that repeats itself does."""
    last, length = len(tokens) - 1, 1
    # Where its last token is.
    ends: np.ndarray = np.flatnonzero(tokens[:last] == tokens[last]) if last > 0 else _NOWHERE
    while length < longest and len(ends):
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends = longer
        length += 1
    if length < shortest or not len(ends):
        return _NOTHING
    start = int(ends[-1]) + 1
    if start + count <= last + 1:
        return tokens[start : start + count]
    return tokens[start + np.arange(count) % (last + 1 - start)]

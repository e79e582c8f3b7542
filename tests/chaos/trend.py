"""Finds out whether a series of measurements rises.

The slope is that of Theil and Sen: the median of the slopes between all pairs of samples, which outliers do not move.
"""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

Sample = tuple[float, float]  # seconds, value


def slope_per_hour(samples: Sequence[Sample]) -> float:
    """Returns the slope, or 0 if there are fewer than two samples at different times."""
    slopes = [(v1 - v0) / (t1 - t0) for (t0, v0), (t1, v1) in combinations(samples, 2) if t1 != t0]
    return 3600 * median(slopes) if slopes else 0.0


def second_half(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Returns the samples after the warm-up, in which caches fill and memory is first used."""
    return samples[len(samples) // 2 :]

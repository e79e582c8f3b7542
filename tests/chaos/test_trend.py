"""Tests of what a soak counts as a rise."""

import random

from tests.chaos.soak import Series, rises
from tests.chaos.trend import slope_per_hour

HALF_MINUTES = [30.0 * count for count in range(60)]


def series_of(memory: list[float]) -> Series:
    one = Series(pid=1)
    one.columns["MiB"] = list(zip(HALF_MINUTES, memory, strict=True))
    return one


def test_the_slope_of_a_line() -> None:
    assert slope_per_hour([(t, 5 + 0.01 * t) for t in HALF_MINUTES]) == 36
    assert slope_per_hour([]) == slope_per_hour([(0.0, 1.0)]) == 0


def test_what_rises_is_named() -> None:
    leaking = series_of([700 + 0.01 * t for t in HALF_MINUTES])
    (problem,) = rises({"executor": leaking})
    assert problem == "the executor's MiB rise by 36.0 per hour; 16 are allowed"


def test_warm_up_noise_outliers_and_falls_are_no_rise() -> None:
    noise = random.Random(1)
    warm = [min(900.0, 700 + t) + noise.gauss(0, 1) for t in HALF_MINUTES]
    warm[45] += 300
    assert not rises({"executor": series_of(warm)})
    assert not rises({"executor": series_of([900 - t for t in HALF_MINUTES])})

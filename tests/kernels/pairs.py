"""Pairs of parameters in place of their full product, which the slow sweep runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairs(names: str, *axes: Sequence[Any], indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrizes a test with all combinations of the axes, one axis for each of the names.

    Of an axis whose values are tuples, each value stands for several names, which are joined by "+". Combinations that
    the pairs do not need are marked slow.
    """
    chosen = pairwise([len(axis) for axis in axes])
    found = []
    for indices in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[index] for axis, index in zip(axes, indices, strict=True)]
        flat = [
            part
            for name, value in zip(names.split(), values, strict=True)
            for part in (value if "+" in name else (value,))
        ]
        marks = [] if indices in chosen else [pytest.mark.slow]
        found.append(pytest.param(*flat, marks=marks, id="-".join(map(_name, values))))
    return pytest.mark.parametrize(names.replace("+", " ").split(), found, indirect=list(indirect))


def pairwise(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Returns few combinations of indices in which every two values of any two axes meet, chosen greedily."""
    combinations = list(itertools.product(*map(range, sizes)))
    meetings = {combination: set(_meetings(combination)) for combination in combinations}
    left, chosen = set().union(*meetings.values()), set()
    while left:
        best = max(combinations, key=lambda combination: len(meetings[combination] & left))
        chosen.add(best)
        left -= meetings[best]
    return chosen


def _meetings(combination: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(itertools.combinations(enumerate(combination), 2))


def _name(value: object) -> str:
    return str(getattr(value, "__name__", value)).replace(" ", "")

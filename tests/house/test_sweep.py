"""The quick suite leaves out cases of products, never a pair of values."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.sweep import covering, pairs_of


@dataclass(eq=False)
class Case:
    """A case as pytest collects it."""

    callspec: SimpleNamespace


def product(sizes: list[int]) -> list[Any]:
    """Returns a case for each combination of values."""
    names = [f"name{index}" for index in range(len(sizes))]
    combinations = itertools.product(*(range(size) for size in sizes))
    return [Case(SimpleNamespace(params=dict(zip(names, values, strict=True)))) for values in combinations]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_each_pair_of_values_stays_in_a_case(sizes: list[int]) -> None:
    cases = product(sizes)
    chosen = covering(cases)
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, cases))
    largest = sorted(sizes)[-2:]
    assert len(chosen) >= (largest[0] * largest[-1] if len(sizes) > 1 else sizes[0])
    assert len(chosen) <= len(cases)

"""The pairs of parameters that tests of kernels run."""

from __future__ import annotations

import itertools

import pytest

from tests.kernels.pairs import pairs, pairwise


@pytest.mark.parametrize("sizes", [(4, 2, 6, 6), (3, 4, 6, 2), (2, 2), (1, 5, 1)])
def test_all_pairs_meet_in_few_combinations(sizes: tuple[int, ...]) -> None:
    chosen = pairwise(sizes)
    for (i, size), (j, other) in itertools.combinations(enumerate(sizes), 2):
        assert {(row[i], row[j]) for row in chosen} == set(itertools.product(range(size), range(other)))
    largest = sorted(sizes)[-2:]
    assert len(chosen) <= 1.5 * largest[0] * largest[1]


def test_what_pairs_leave_out_is_in_the_sweep() -> None:
    mark = pairs("a b+c d", [1, 2, 3], [(1, 2), (3, 4), (5, 6)], "xyz").mark
    names, found = mark.args
    assert names == ["a", "b", "c", "d"] and len(found) == 27 and found[0].values == (1, 1, 2, "x")
    assert sum(not row.marks for row in found) == len(pairwise([3, 3, 3])) < 15

"""Loads of an executor with several ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagewire.services.executor.tiers.joined import JoinedLoads
from pagewire.services.executor.tiers.loads import Loaded

RANKS = 3


@given(st.lists(st.lists(st.sets(st.integers(0, 5)), min_size=RANKS, max_size=RANKS), max_size=4), st.randoms())
def test_a_block_is_loaded_if_all_ranks_have_loaded_it(loads: list[list[set[int]]], random) -> None:
    joined, reported = JoinedLoads(RANKS), list[Loaded]()
    parts = []
    for load_id, missing in enumerate(loads):
        number = joined.join(load_id, reported.append)
        parts += [Loaded(number, sorted(one), 0.5 + rank, {"disk": 8}) for rank, one in enumerate(missing)]
    random.shuffle(parts)
    for part in parts:
        joined.on_loaded(part)
    assert sorted(reported, key=lambda one: one.load_id) == [
        Loaded(load_id, sorted(set[int]().union(*missing)), RANKS - 0.5, {"disk": 8 * RANKS})
        for load_id, missing in enumerate(loads)
    ]


def test_reports_of_a_load_that_was_cancelled_reach_no_later_one() -> None:
    joined, reported = JoinedLoads(2), list[Loaded]()
    cancelled, later = joined.join(1, reported.append), joined.join(1, reported.append)
    for number in (later, cancelled, later):
        joined.on_loaded(Loaded(number, [], 0.0, {}))
    assert len(reported) == 1

"""The quick suite and the full sweep: `make test` and `make test-all`."""

from __future__ import annotations

import os
from collections import defaultdict
from itertools import combinations, zip_longest
from pathlib import PurePath
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

IS_FULL = os.environ.get("PAGEWIRE_TEST_ALL") == "1"
EVERY_CASE = os.environ.get("PAGEWIRE_EVERY_CASE") == "1"  # of the quick tests

# A parameter's name and the id of its value, twice.
Pair = tuple[tuple[str, str], ...]


def examples(full: int) -> int:
    """Returns how many examples a property draws: `full` in the full sweep, a fifth of them in the quick suite."""
    return full if IS_FULL else max(full // 5, 8)


def deselect_repetitions(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects cases of tests that are marked with `pairs` or `few`, unless some tests are asked for by name.

    pairs: each pair of parameter values stays in one case. A covering of pairs finds what depends on one value or on
    two together, with a fraction of the cases of the product.
    few(*ids): the cases with these ids stay.
    """
    if IS_FULL or EVERY_CASE or config.option.keyword or any("::" in argument for argument in config.args):
        return
    functions: dict[Any, list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_marked = any(item.get_closest_marker(name) is not None for name in ("few", "pairs"))
        if is_marked and item.get_closest_marker("slow") is None and hasattr(item, "callspec"):
            functions[item.nodeid.partition("[")[0]].append(item)
    left_out = []
    for cases in functions.values():
        few = cases[0].get_closest_marker("few")
        kept = covering(cases) if few is None else named(cases, few.args)
        left_out += [case for case in cases if case not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        out = set(left_out)
        items[:] = [item for item in items if item not in out]


class ByLine(LoadFileScheduling):
    """Gives a worker one file after the other; tests that share running services are one file."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    """Returns the folder of a test of whole lines, the file of any other."""
    file = nodeid.partition("::")[0]
    return str(PurePath(file).parent) if file.startswith("tests/e2e/") else file


def mixed(items: list[pytest.Item]) -> None:
    """Orders tests so that what waits and what computes come in turn, both before the many short files.

    With several workers the processors are then busy all the time, and no worker ends long after the rest.
    """
    scopes: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        scopes[scope_of(item.nodeid)].append(item)
    waiting = [scope for scope in scopes if scope.startswith(("tests/e2e/", "tests/chaos/", "tests/pagewire/process/"))]
    computing = [scope for scope in scopes if scope.startswith(("tests/kernels/", "tests/services/executor/triton/"))]
    pairs = (scope for pair in zip_longest(waiting, computing) for scope in pair if scope is not None)
    items[:] = [item for scope in dict.fromkeys([*pairs, *scopes]) for item in scopes[scope]]


def named(cases: list[pytest.Item], ids: tuple[str, ...]) -> list[pytest.Item]:
    """Returns the cases with these ids. Raises UsageError for an id that no case has."""
    found = {case.callspec.id: case for case in cases}  # type: ignore[attr-defined]
    if missing := set(ids) - found.keys():
        raise pytest.UsageError(f"{cases[0].nodeid}: the mark few names {sorted(missing)}, not among {sorted(found)}")
    return [found[id] for id in ids]


def covering(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns cases in which each pair of parameter values of `cases` occurs: greedily, those that add most first."""
    pairs = {case: pairs_of(case) for case in cases}
    missing = set[Pair]().union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def pairs_of(case: Any) -> set[Pair]:
    """Returns the pairs of parameter values of a case; of a single parameter, its value."""
    values = sorted((name, repr(value)) for name, value in case.callspec.params.items())
    return set(combinations(values, min(2, len(values))))

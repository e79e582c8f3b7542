"""Combines what the clauses of an object say."""

from __future__ import annotations

from collections.abc import Collection

from pagewire.services.executor.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Clause,
    Intersections,
    Literal,
    Object,
    String,
    Union,
)
from pagewire.services.executor.grammar.schema.texts import matches


def is_closed(shape: Object, closes: bool) -> bool:
    """Returns whether an object has no properties but those that it names or has a pattern for, because no schema says
    anything of others."""
    says_something = any(clause.rest is not None for clause in shape.clauses)
    return closes and not says_something and any(clause.declares for clause in shape.clauses)


def value_of(shape: Object, name: str, intersections: Intersections) -> Union:
    """Returns what the property of this name may be, if it is written."""
    if shape.names is not None and not any(_admits(one, name) for one in shape.names):
        return NOTHING
    return intersections.all_of(_of_clause(clause, name, intersections) for clause in shape.clauses)


def value_of_others(shape: Object, matched: Collection[str], intersections: Intersections) -> Union:
    """Returns what properties may be that no schema names, and that match these patterns and no others."""
    return intersections.all_of(_of_others(clause, matched, intersections) for clause in shape.clauses)


def _of_clause(clause: Clause, name: str, intersections: Intersections) -> Union:
    given = [clause.named[name]] if name in clause.named else []
    given += [value for pattern, value in clause.patterns if matches("pattern", pattern, name)]
    return intersections.all_of(given) if given else _rest(clause)


def _of_others(clause: Clause, matched: Collection[str], intersections: Intersections) -> Union:
    given = [value for pattern, value in clause.patterns if pattern in matched]
    return intersections.all_of(given) if given else _rest(clause)


def _rest(clause: Clause) -> Union:
    return ANYTHING if clause.rest is None else clause.rest


def _admits(shape: String | Literal, name: str) -> bool:
    return shape.value == name if isinstance(shape, Literal) else shape.admits(name)

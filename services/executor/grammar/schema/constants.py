"""Arrays and objects that are one value, written as terminals: as rules, each of them would be an alternative that the
parser follows, and it follows no more than 2,000."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence

from pagewire.services.executor.grammar.schema.exact_json import written
from pagewire.services.executor.grammar.schema.objects import value_of
from pagewire.services.executor.grammar.schema.shapes import (
    NOTHING,
    Array,
    Intersections,
    Literal,
    Object,
    Shape,
    Union,
)

Parts = tuple[str, ...]  # of a value, between which whitespace may stand


def parts_of(shape: Shape, intersections: Intersections) -> Parts | None:
    """Returns the parts of the only value of a shape; None if it has several, or none."""
    match shape:
        case Literal():
            return (written(shape.value),)
        case Array() if shape.min_items == shape.max_items == len(shape.prefix) and not shape.is_unique:
            return _between("[", [_parts_of_one(union, intersections) for union in shape.prefix], "]")
        case Object() if _is_whole(shape):
            values = [(name, value_of(shape, name, intersections)) for name in _names(shape)]
            pairs = [(name, _parts_of_one(union, intersections)) for name, union in values]
            return _between("{", [part and (written(name), ":", *part) for name, part in pairs], "}")
    return None


def _is_whole(shape: Object) -> bool:
    """Returns whether an object has all properties that it may have."""
    count = len(shape.required)
    return (
        any(clause.rest == NOTHING and not clause.patterns for clause in shape.clauses)
        and shape.names is None
        and set(_names(shape)) == set(shape.required)
        and shape.min_properties <= count <= (count if shape.max_properties is None else shape.max_properties)
    )


def _names(shape: Object) -> list[str]:
    return [*dict.fromkeys(name for clause in shape.clauses for name in clause.named)]


def _parts_of_one(union: Union, intersections: Intersections) -> Parts | None:
    return parts_of(union[0], intersections) if len(union) == 1 else None


def _between(begin: str, items: Sequence[Parts | None], end: str) -> Parts | None:
    parts = [begin]
    for index, item in enumerate(items):
        if item is None:
            return None
        parts += [",", *item] if index else item
    return (*parts, end)


def expression(values: Iterable[Parts], space: str, terminal: Callable[[str], str]) -> str:
    """Returns the expression of a terminal for any of the values. What several begin with is written once: so a lexer
    follows it once.

    space: an expression for whitespace; "" for none. terminal: returns the name of a terminal.
    """
    tree: dict[str, dict] = {}  # type: ignore[type-arg]
    for parts in values:
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
    return _alternatives(tree, f" {space} " if space else " ", terminal)


def _alternatives(tree: dict[str, dict], space: str, terminal: Callable[[str], str]) -> str:  # type: ignore[type-arg]
    ways = []
    for part, rest in tree.items():
        way = [json.dumps(part)]
        while len(rest) == 1:
            ((part, rest),) = rest.items()
            way.append(json.dumps(part))
        if rest:
            way.append(terminal(_alternatives(rest, space, terminal)))
        ways.append(space.join(way))
    return " | ".join(ways)

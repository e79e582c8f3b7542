"""Decides whether at most one of several schemas holds, as oneOf demands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pagewire.services.executor.grammar.schema.objects import is_closed, value_of
from pagewire.services.executor.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Array,
    Clause,
    Intersections,
    Object,
    Ref,
    Shape,
    Union,
)


class Disjointness:
    """Compares unions."""

    def __init__(self, intersections: Intersections, resolve: Callable[[Ref], Union], *, closes: bool) -> None:
        self._intersections = intersections
        self._resolve = resolve
        self._closes = closes
        self._comparing: set[tuple[Union, Union]] = set()

    def separated(self, options: Sequence[Union]) -> Sequence[Union] | None:
        """Returns options of which no two hold for one value that is written; None if that is not so.

        Where they exclude each other only because objects are closed, they are returned closed for good.
        """
        if all(self._exclude(one, other) for index, one in enumerate(options) for other in options[:index]):
            return options
        closed = [self._close(option) for option in options]
        pairs = ((one, other) for one in range(len(options)) for other in range(len(options)) if one != other)
        return closed if all(self._exclude(closed[one], options[other]) for one, other in pairs) else None

    def _close(self, union: Union) -> Union:
        return tuple(self._closed(shape) for shape in self._plain(union))

    def _closed(self, shape: Shape) -> Shape:
        if not isinstance(shape, Object) or not is_closed(shape, self._closes):
            return shape
        named = dict.fromkeys((*(name for clause in shape.clauses for name in clause.named), *shape.required))
        patterns = dict.fromkeys(pattern for clause in shape.clauses for pattern, _ in clause.patterns)
        closing = Clause(
            tuple((name, ANYTHING) for name in named), tuple((pattern, ANYTHING) for pattern in patterns), NOTHING
        )
        return replace(shape, clauses=(*shape.clauses, closing))

    def _plain(self, union: Union) -> Union:
        """Returns the union without references."""
        return tuple(
            inner for shape in union for inner in (self._resolve(shape) if isinstance(shape, Ref) else (shape,))
        )

    def _exclude(self, one: Union, other: Union) -> bool:
        if (one, other) in self._comparing:
            return True  # a value is finite, so none is common to both because it contains itself
        self._comparing.add((one, other))
        try:
            pairs = ((left, right) for left in self._plain(one) for right in self._plain(other))
            return all(self._shapes_exclude(left, right) for left, right in pairs)
        finally:
            self._comparing.discard((one, other))

    def _shapes_exclude(self, one: Shape, other: Shape) -> bool:
        self._intersections.count()
        if isinstance(one, Array) and isinstance(other, Array):
            if not self._intersections.both((one,), (other,)):
                return True
            num_both = min(max(one.min_items, other.min_items), max(len(one.prefix), len(other.prefix)) + 1)
            return any(self._exclude(one.item(index), other.item(index)) for index in range(num_both))
        if isinstance(one, Object) and isinstance(other, Object):
            values = (
                (value_of(one, name, self._intersections), value_of(other, name, self._intersections))
                for name in dict.fromkeys((*one.required, *other.required))
            )
            return any(self._exclude(left, right) for left, right in values)
        return not self._intersections.both((one,), (other,))

"""Shapes: the values that a schema allows are a union of them. Their intersections."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property

from pagewire.services.executor.grammar.schema.errors import SchemaError
from pagewire.services.executor.grammar.schema.numbers import Number
from pagewire.services.executor.grammar.schema.texts import matches

Scalar = bool | int | Decimal | str | None
_MAX_SHAPES = 100_000  # that one schema makes


@dataclass(frozen=True)
class Anything:
    """Any JSON."""


@dataclass(frozen=True)
class Literal:
    """One scalar. kind: the name of its type, since True and 1 are equal in Python."""

    kind: str
    value: Scalar

    def key(self) -> tuple[str, Scalar | Fraction]:
        """Returns what is equal for scalars that are equal in JSON."""
        number = self.number()
        return (self.kind, self.value) if number is None else ("number", number)

    def number(self) -> Fraction | None:
        return Fraction(self.value) if self.kind in ("int", "Decimal") else None  # type: ignore[arg-type]


def literal(value: Scalar) -> Literal:
    return Literal(type(value).__name__, value)


@dataclass(frozen=True)
class String:
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    def admits(self, text: str) -> bool:
        if len(text) < self.min_length or (self.max_length is not None and len(text) > self.max_length):
            return False
        if text in self.excluded:
            return False
        keys = [("pattern", pattern) for pattern in self.patterns] + [("format", name) for name in self.formats]
        return all(matches(key, value, text) for key, value in keys)


@dataclass(frozen=True)
class Ref:
    """Values that all schemas at these places allow."""

    pointers: frozenset[str]


@dataclass(frozen=True)
class Array:
    """Arrays that begin with `prefix`, after which each item is one of `rest`."""

    prefix: tuple[Union, ...] = ()
    rest: Union = (Anything(),)
    min_items: int = 0
    max_items: int | None = None
    is_unique: bool = False
    place: str = field(default="", compare=False)

    def item(self, index: int) -> Union:
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclass(frozen=True)
class Clause:
    """Statements of one schema on the properties of an object. rest: on those that it neither names nor has a pattern
    for; None if it says nothing."""

    properties: tuple[tuple[str, Union], ...] = ()
    patterns: tuple[tuple[str, Union], ...] = ()
    rest: Union | None = None
    declares: bool = False  # it has `properties`

    @cached_property
    def named(self) -> Mapping[str, Union]:
        return dict(self.properties)


@dataclass(frozen=True)
class Object:
    """Objects of which each property fulfils all clauses."""

    clauses: tuple[Clause, ...] = ()
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    names: tuple[String | Literal, ...] | None = None  # any of which each name must be
    place: str = field(default="", compare=False)


Shape = Anything | Literal | Number | String | Array | Object | Ref
Union = tuple[Shape, ...]
ANYTHING: Union = (Anything(),)
NOTHING: Union = ()
NO_OBJECT: Union = (literal(None), literal(True), literal(False), Number(), String(), Array())


def unique(shapes: Iterable[Shape]) -> Union:
    found = tuple(dict.fromkeys(shapes))
    return ANYTHING if Anything() in found else found


class Intersections:
    """Intersects unions, of which the references are resolved where they meet anything but references."""

    def __init__(self, resolve: Callable[[Ref], Union]) -> None:
        self._resolve = resolve
        self._num_shapes = 0

    def count(self, place: str = "") -> None:
        """Raises SchemaError if the schema makes too many shapes."""
        self._num_shapes += 1
        if self._num_shapes > _MAX_SHAPES:
            raise SchemaError(place, "the schema combines too many alternatives; simplify it")

    def all_of(self, unions: Iterable[Union]) -> Union:
        together: Union = ANYTHING
        for union in unions:
            together = self.both(together, union)
        return together

    def both(self, one: Union, other: Union) -> Union:
        if one in (ANYTHING, other):
            return other
        if other == ANYTHING:
            return one
        if literals := self._literals(one, other):
            return literals
        return unique(shape for left in one for right in other for shape in self._both(left, right))

    def _literals(self, one: Union, other: Union) -> Union:
        """The common scalars of two lists of many, which are not compared one by one."""
        if len(one) * len(other) < 1000 or not all(isinstance(shape, Literal) for shape in (*one, *other)):
            return ()
        keys = {shape.key() for shape in other if isinstance(shape, Literal)}
        return tuple(shape for shape in one if isinstance(shape, Literal) and shape.key() in keys)

    def _both(self, one: Shape, other: Shape) -> Union:
        self.count()
        match one, other:
            case (Anything(), shape) | (shape, Anything()):
                return (shape,)
            case Ref(pointers), Ref(others):
                return (Ref(pointers | others),)
            case (Ref() as ref, shape) | (shape, Ref() as ref):
                resolved = self._resolve(ref)
                return self.both(resolved, (shape,)) if shape is other else self.both((shape,), resolved)
            case Literal() as scalar, Literal() as second:
                return (scalar,) if scalar.key() == second.key() else ()
            case (Literal() as scalar, String() as string) | (String() as string, Literal() as scalar):
                return (scalar,) if isinstance(scalar.value, str) and string.admits(scalar.value) else ()
            case (Literal() as scalar, Number() as number) | (Number() as number, Literal() as scalar):
                value = scalar.number()
                return (scalar,) if value is not None and number.admits(value) else ()
            case Number() as first, Number() as second:
                return () if (number := first.and_also(second)).is_empty() else (number,)
            case String() as first, String() as second:
                return _strings(first, second)
            case Array() as first, Array() as second:
                return self._arrays(first, second)
            case Object() as first, Object() as second:
                return (self._objects(first, second),)
        return ()

    def _arrays(self, one: Array, other: Array) -> Union:
        num_first = max(len(one.prefix), len(other.prefix))
        least, most = max(one.min_items, other.min_items), _least(one.max_items, other.max_items)
        if most is not None and least > most:
            return ()
        prefix = tuple(self.both(one.item(index), other.item(index)) for index in range(num_first))
        rest, is_unique = self.both(one.rest, other.rest), one.is_unique or other.is_unique
        return (Array(prefix, rest, least, most, is_unique, one.place),)

    def _objects(self, one: Object, other: Object) -> Object:
        names = one.names if other.names is None else other.names
        if one.names is not None and other.names is not None:
            names = tuple(shape for shape in self.both(one.names, other.names) if isinstance(shape, String | Literal))
        return Object(
            clauses=tuple(dict.fromkeys((*one.clauses, *other.clauses))),
            required=tuple(dict.fromkeys((*one.required, *other.required))),
            min_properties=max(one.min_properties, other.min_properties),
            max_properties=_least(one.max_properties, other.max_properties),
            names=names,
            place=one.place,
        )


def _strings(one: String, other: String) -> Union:
    least, most = max(one.min_length, other.min_length), _least(one.max_length, other.max_length)
    if most is not None and least > most:
        return ()
    return (
        replace(
            one,
            min_length=least,
            max_length=most,
            patterns=tuple(dict.fromkeys((*one.patterns, *other.patterns))),
            formats=tuple(dict.fromkeys((*one.formats, *other.formats))),
            excluded=tuple(dict.fromkeys((*one.excluded, *other.excluded))),
        ),
    )


def _least(one: int | None, other: int | None) -> int | None:
    given = [limit for limit in (one, other) if limit is not None]
    return min(given, default=None)

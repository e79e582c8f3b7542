"""Shapes as a grammar in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llguidance import regex_to_lark

from pagewire.services.executor.grammar.schema.constants import Parts, parts_of
from pagewire.services.executor.grammar.schema.constants import expression as expression_of
from pagewire.services.executor.grammar.schema.engine_errors import NOTHING_MATCHES
from pagewire.services.executor.grammar.schema.errors import SchemaError, step, wrong
from pagewire.services.executor.grammar.schema.exact_json import written
from pagewire.services.executor.grammar.schema.multiples import multiples
from pagewire.services.executor.grammar.schema.numbers import Number, expression
from pagewire.services.executor.grammar.schema.object_rules import ObjectRules
from pagewire.services.executor.grammar.schema.options import Options
from pagewire.services.executor.grammar.schema.reading import Schemas
from pagewire.services.executor.grammar.schema.rules import Repeat, Rules, Symbol
from pagewire.services.executor.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Anything,
    Array,
    Literal,
    Object,
    Ref,
    Shape,
    String,
    Union,
    unique,
)
from pagewire.services.executor.grammar.schema.texts import CHARACTER, MAX_KEY_LENGTH, why_refused

# Limits of JSON that no schema describes: a model that opens brackets or repeats a key may never stop either.
MAX_DEPTH = 12
MAX_ITEMS = 1000
MAX_PROPERTIES = 100
_MANY = 100  # alternatives that are arrays or objects
_MAX_UNIQUE = 8  # values of which each item of an array is another


def to_lark(schema: Any, options: Options) -> str:
    """Returns the grammar of a schema that `exact_json.parse` has read.

    Raises SchemaError if the schema is wrong, or cannot be guaranteed.
    """
    options = options.with_own(schema)
    try:
        return _Writer(Schemas(schema, options), options).grammar(schema)
    except RecursionError:
        wrong("", "the schema is nested too deeply")


class _Writer:
    def __init__(self, schemas: Schemas, options: Options) -> None:
        self._schemas = schemas
        self._options = options
        self._whitespace = options.whitespace
        self._rules = Rules()
        self._objects = ObjectRules(self._rules, schemas.intersections, self.rule, self._string, options)
        self._names: dict[Union, str] = {}
        self._pending: list[tuple[str, Union]] = []

    def grammar(self, schema: Any) -> str:
        start = self.rule(self._schemas.read(schema, ""))
        while self._pending:
            name, union = self._pending.pop()
            self._rules.define(name, self._ways(union))
        lines = ['%llguidance {"ignore_once": true}', *self._rules.written(start)]
        if self._whitespace is not None:
            lines.append(f"%ignore /{regex_to_lark(self._whitespace, '')}/")
        return "\n".join(lines)

    def rule(self, union: Union) -> str:
        """Returns the name of the rule for a union, which is written later."""
        if union == ANYTHING:
            return self._anything(MAX_DEPTH)
        if union not in self._names:
            self._names[union] = self._rules.name()
            self._pending.append((self._names[union], union))
        return self._names[union]

    def _ways(self, union: Union) -> list[tuple[Symbol, ...]]:
        ways: list[tuple[Symbol, ...]] = []
        scalars: list[str] = []
        if values := self._constants(union):
            scalars.append(expression_of(values, self._space(), self._rules.terminal))
        for shape in union:
            if isinstance(shape, Literal):
                scalars.append(json.dumps(written(shape.value)))
            elif isinstance(shape, Number):
                text, is_rule = self._number(shape)
                if is_rule:
                    ways.append((self._rules.given(text),))
                else:
                    scalars.append(text)
            elif isinstance(shape, String) or not values:
                ways += self._structure(shape)
        if scalars:  # one terminal: as alternatives of a rule, the parser would take no more than 2,000
            ways.append((self._rules.terminal(" | ".join(scalars)),))
        return ways

    def _structure(self, shape: Shape) -> list[tuple[Symbol, ...]]:
        match shape:
            case Anything():
                return [(self._anything(MAX_DEPTH),)]
            case Ref():
                return [(self.rule(self._schemas.resolve(shape)),)]
            case String():
                return [(name,)] if (name := self._string(shape)) else []
            case Array():
                return self._array(replace(shape, max_items=MAX_ITEMS) if shape == Array() else shape)
            case Object():
                is_free = shape == Object()
                return self._objects.ways(replace(shape, max_properties=MAX_PROPERTIES) if is_free else shape)
        raise AssertionError(shape)

    def _constants(self, union: Union) -> list[Parts]:
        """The parts of the arrays and objects of a union, if these are many and each is one value; otherwise none. As a
        lexeme, a value hides others that begin with its first bracket only."""
        shapes = [shape for shape in union if not isinstance(shape, Literal | Number | String)]
        found = [parts_of(shape, self._schemas.intersections) for shape in shapes] if len(shapes) >= _MANY else []
        values = [parts for parts in found if parts is not None]
        return values if len(values) == len(shapes) else []

    def _space(self) -> str:
        """An expression for the whitespace in one place."""
        if self._whitespace is None:
            return ""
        return self._rules.terminal(f"/{regex_to_lark(self._whitespace, '')}/") + "?"

    # -- scalars ------------------------------------------------------------------------------------------------------

    def _number(self, number: Number) -> tuple[str, bool]:
        if number.multiple_of is None:
            return f"/{expression(number)}/", False
        found = multiples(number)
        return (found, False) if isinstance(found, str) else (self._json(found), True)

    def _string(self, string: String) -> str | None:
        """Returns the name of a rule or a terminal; None if there is no such string."""
        if string.excluded:
            return self._string_besides(string)
        schema: dict[str, Any] = {"type": "string", "minLength": string.min_length}
        if string.max_length is not None:
            schema["maxLength"] = string.max_length
        parts = [{"pattern": pattern} for pattern in string.patterns] + [{"format": name} for name in string.formats]
        if parts:
            schema["allOf"] = parts
        if (error := why_refused(json.dumps(schema))) == NOTHING_MATCHES:
            return None
        if error:
            wrong("", error)
        return self._rules.given(self._json(schema))

    def _string_besides(self, string: String) -> str:
        if string.patterns or string.formats:
            raise SchemaError("", "texts cannot be excluded from those of a pattern or a format; change the pattern")
        excluded = " | ".join(json.dumps(written(text)[1:-1]) for text in string.excluded)
        most = "" if string.max_length is None else string.max_length
        return self._rules.terminal(f'"\\"" (/{CHARACTER}{{{string.min_length},{most}}}/ & ~({excluded})) "\\""')

    def _json(self, schema: dict[str, Any]) -> str:
        options: Mapping[str, Any] = {"whitespace_flexible": False}
        if self._whitespace is not None:
            options = {"whitespace_pattern": self._whitespace}
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"

    # -- arrays -------------------------------------------------------------------------------------------------------

    def _array(self, array: Array) -> list[tuple[Symbol, ...]]:
        if array.is_unique and array.max_items not in (0, 1) and not self._options.is_lenient:
            return [(self._rules.terminal('"["'), self._unique_items(array), self._rules.terminal('"]"'))]
        comma, least, most = self._rules.terminal('","'), array.min_items, array.max_items
        num_first = len(array.prefix) if most is None else min(len(array.prefix), most)
        behind = self._rest(array, num_first, comma)
        for index in reversed(range(num_first)):
            item = (*([comma] if index else []), self.rule(array.prefix[index]), self._rules.add(behind))
            behind = [item] if index < least else [(), item]
        return [(self._rules.terminal('"["'), self._rules.add(behind), self._rules.terminal('"]"'))]

    def _rest(self, array: Array, num_first: int, comma: str) -> list[tuple[Symbol, ...]]:
        least = max(0, array.min_items - num_first)
        most = None if array.max_items is None else array.max_items - num_first
        ways: list[tuple[Symbol, ...]] = [()] if least == 0 else []
        if array.rest == NOTHING or most == 0:
            return ways
        item = self.rule(array.rest)
        if num_first:
            return [*ways, (Repeat((comma, item), max(1, least), most),)]
        return [*ways, (item, Repeat((comma, item), max(0, least - 1), None if most is None else most - 1))]

    def _unique_items(self, array: Array) -> str:
        values = unique(shape for union in (*array.prefix, array.rest) for shape in self._listed(union))
        if not all(isinstance(value, Literal) for value in values) or len(values) > _MAX_UNIQUE or array.prefix:
            wrong(
                step(array.place, "uniqueItems"),
                f"uniqueItems can be guaranteed for arrays of at most {_MAX_UNIQUE} values that an enum lists only",
            )
        literals = [value for value in values if isinstance(value, Literal)]
        by_key = {value.key(): self.rule((value,)) for value in literals}
        return self._another_item([*by_key.values()], 0, array, {})

    def _listed(self, union: Union) -> Union:
        return tuple(
            inner for shape in union for inner in (self._schemas.resolve(shape) if isinstance(shape, Ref) else (shape,))
        )

    def _another_item(self, values: list[str], used: int, array: Array, made: dict[int, str]) -> str:
        """The rule of what follows the values of a bit mask."""
        if used not in made:
            made[used] = self._rules.name()
            count = used.bit_count()
            ways: list[tuple[Symbol, ...]] = [()] if count >= array.min_items else []
            if array.max_items is None or count < array.max_items:
                comma = [self._rules.terminal('","')] if used else []
                ways += [
                    (*comma, value, self._another_item(values, used | 1 << index, array, made))
                    for index, value in enumerate(values)
                    if not used >> index & 1
                ]
            self._rules.define(made[used], ways)
        return made[used]

    # -- any JSON -----------------------------------------------------------------------------------------------------

    def _anything(self, depth: int) -> str:
        """The rule of JSON that is nested so deep at most."""
        shapes: list[Shape] = [*_SCALARS, String()]
        key: Union = (*shapes, Ref(frozenset({f"any JSON {depth}"})))
        if key not in self._names:
            name = self._names[key] = self._rules.name()
            ways = self._ways(tuple(shapes))
            if depth:
                inner, comma = self._anything(depth - 1), self._rules.terminal('","')
                key_text = self._string(String(max_length=MAX_KEY_LENGTH))
                assert key_text is not None
                pair = self._rules.add([(key_text, self._rules.terminal('":"'), inner)])
                for begin, one, end, most in (('"["', inner, '"]"', MAX_ITEMS), ('"{"', pair, '"}"', MAX_PROPERTIES)):
                    several = self._rules.add([(), (one, Repeat((comma, one), 0, most - 1))])
                    ways.append((self._rules.terminal(begin), several, self._rules.terminal(end)))
            self._rules.define(name, ways)
        return self._names[key]


_SCALARS: tuple[Shape, ...] = (
    *(Literal(type(value).__name__, value) for value in (None, True, False)),
    Number(),
)

"""Negates schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pagewire.services.executor.grammar.schema.errors import SchemaError, step, wrong
from pagewire.services.executor.grammar.schema.keywords import constant
from pagewire.services.executor.grammar.schema.numbers import Bound, Number
from pagewire.services.executor.grammar.schema.options import Options
from pagewire.services.executor.grammar.schema.references import References
from pagewire.services.executor.grammar.schema.shapes import (
    ANYTHING,
    NOTHING,
    Array,
    Clause,
    Intersections,
    Literal,
    Object,
    String,
    Union,
    literal,
    unique,
)

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
PLAIN: Mapping[str, Union] = {
    "null": (literal(None),),
    "boolean": (literal(True), literal(False)),
    "number": (Number(),),
    "string": (String(),),
    "array": (Array(),),
    "object": (Object(),),
}


# What demands something of a value.
_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
_OF_ARRAYS = (
    "items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains",
    "maxContains", "unevaluatedItems",
)  # fmt: skip
_OF_OBJECTS = (
    "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    "propertyNames", "unevaluatedProperties",
)  # fmt: skip
OF_TYPES = frozenset(("type", *_OF_NUMBERS, *_OF_STRINGS, *_OF_ARRAYS, *_OF_OBJECTS))
# Of what applies to the same value.
IN_PLACE = (
    "const", "enum", "allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "not",
    "dependentRequired", "dependentSchemas", "dependencies",
)  # fmt: skip
KEYWORDS = OF_TYPES | frozenset(IN_PLACE)


class Negation:
    """Negates schemas, keyword by keyword."""

    def __init__(
        self,
        read: Callable[[Any, str, int], Union],
        references: References,
        intersections: Intersections,
        options: Options,
    ) -> None:
        self._read = read
        self._references = references
        self._intersections = intersections
        self._is_lenient = options.is_lenient

    def besides(self, schema: Any, place: str, depth: int) -> Union:
        """Returns what a schema does not allow. Raises SchemaError if that cannot be said."""
        try:
            return self._exactly_besides(schema, place, depth)
        except SchemaError:
            if self._is_lenient:
                return ANYTHING
            raise

    def _exactly_besides(self, schema: Any, place: str, depth: int) -> Union:
        if isinstance(schema, bool):
            return NOTHING if schema else ANYTHING
        if not isinstance(schema, dict):
            wrong(place, "a schema must be an object, true or false")
        self._read(schema, place, depth)  # its own errors first
        ways = [self._besides(key, schema[key], step(place, key), depth) for key in schema if key in KEYWORDS]
        return unique(shape for way in ways for shape in way)

    def _besides(self, key: str, value: Any, place: str, depth: int) -> Union:
        match key:
            case "type":
                names = [value] if isinstance(value, str) else value
                if "integer" not in names or "number" in names:
                    return tuple(shape for name in TYPES if name not in (*names, "integer") for shape in PLAIN[name])
            case "const":
                return self._besides_scalars([value], place)
            case "enum":
                return self._besides_scalars(value, place)
            case "required":
                return tuple(Object((Clause(((name, NOTHING),)),)) for name in value)
            case "properties":
                return tuple(
                    Object((Clause(((name, self.besides(one, step(place, name), depth + 1)),)),), required=(name,))
                    for name, one in value.items()
                )
            case "not":
                return self._read(value, place, depth + 1)
            case "anyOf":
                others = (self.besides(one, step(place, index), depth + 1) for index, one in enumerate(value))
                return self._intersections.all_of(others)
            case "allOf":
                others = (self.besides(one, step(place, index), depth + 1) for index, one in enumerate(value))
                return unique(shape for union in others for shape in union)
            case "$ref":
                pointer = self._references.pointer(value, place)
                return self.besides(self._references.at(pointer), pointer, depth + 1)
        raise SchemaError(place, f"{key} cannot be negated; say what is allowed instead")

    def _besides_scalars(self, values: Iterable[Any], place: str) -> Union:
        together: Union = ANYTHING
        for value in values:
            shapes = constant(value, place)
            if not all(isinstance(shape, Literal) for shape in shapes):
                wrong(place, "an object or an array cannot be negated; say what is allowed instead")
            (scalar,) = shapes
            assert isinstance(scalar, Literal)
            others: list[Any] = [shape for name in TYPES if name != "integer" for shape in PLAIN[name]]
            if isinstance(scalar.value, str):
                others = [shape for shape in others if not isinstance(shape, String)]
                others.append(String(excluded=(scalar.value,)))
            elif (number := scalar.number()) is not None:
                others = [shape for shape in others if not isinstance(shape, Number)]
                others += [Number(high=Bound(number, True)), Number(low=Bound(number, True))]
            else:
                others.remove(scalar)
            together = self._intersections.both(together, unique(others))
        return together

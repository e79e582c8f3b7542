"""A JSON schema, keyword by keyword, as shapes: drafts 4 to 2020-12. What cannot be guaranteed is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagewire.services.executor.grammar.schema.disjoint import Disjointness
from pagewire.services.executor.grammar.schema.errors import SchemaError, step, wrong
from pagewire.services.executor.grammar.schema.keywords import (
    check_depth,
    check_kinds,
    check_pattern,
    constant,
    count_at,
    mapping_at,
    names_at,
    numbers_of,
    strings_of,
)
from pagewire.services.executor.grammar.schema.negation import IN_PLACE, OF_TYPES, PLAIN, TYPES, Negation
from pagewire.services.executor.grammar.schema.numbers import Number
from pagewire.services.executor.grammar.schema.options import Options
from pagewire.services.executor.grammar.schema.references import References
from pagewire.services.executor.grammar.schema.shapes import (
    ANYTHING,
    NO_OBJECT,
    NOTHING,
    Array,
    Clause,
    Intersections,
    Literal,
    Object,
    Ref,
    String,
    Union,
    unique,
)


class Schemas:
    """The schemas of one document."""

    def __init__(self, root: Any, options: Options) -> None:
        self._is_lenient = options.is_lenient
        self._references = References(root)
        self._read: dict[str, Union] = {}
        self._resolving: set[str] = set()
        self.intersections = Intersections(self.resolve)
        self._negation = Negation(self.read, self._references, self.intersections, options)
        self._disjointness = Disjointness(self.intersections, self.resolve, closes=options.closes)
        self._in_place: dict[str, Callable[[Any, str, Mapping[str, Any], int], Union]] = {
            "const": lambda value, place, _schema, _depth: constant(value, place),
            "enum": self._enum,
            "allOf": self._all_of,
            "anyOf": self._any_of,
            "$ref": self._ref,
            "$dynamicRef": self._ref,
            "$recursiveRef": self._ref,
            "not": self._not,
            "if": self._if,
            "dependentRequired": self._dependent,
            "dependentSchemas": self._dependent,
            "dependencies": self._dependent,
        }

    def resolve(self, ref: Ref) -> Union:
        """Returns what the schemas at a reference's places allow together; nothing if they refer to themselves."""
        if ref.pointers & self._resolving:
            return NOTHING
        self._resolving |= ref.pointers
        try:
            unions = [self._at(pointer) for pointer in sorted(ref.pointers)]
            together = self.intersections.all_of(unions)
            inner = [shape for shape in together if isinstance(shape, Ref)]
            others = [shape for shape in together if not isinstance(shape, Ref)]
            return unique([*others, *(shape for inner_ref in inner for shape in self.resolve(inner_ref))])
        finally:
            self._resolving -= ref.pointers

    def _at(self, pointer: str) -> Union:
        if pointer not in self._read:
            self._read[pointer] = self.read(self._references.at(pointer), pointer)
        return self._read[pointer]

    def read(self, schema: Any, place: str, depth: int = 0) -> Union:
        """Returns what a schema allows. Raises SchemaError."""
        self.intersections.count(place)
        check_depth(depth, place)
        if isinstance(schema, bool):
            return ANYTHING if schema else NOTHING
        if not isinstance(schema, dict):
            wrong(place, "a schema must be an object, true or false")
        check_kinds(schema, place)
        parts, is_typed = [], False
        for key, value in schema.items():
            if key in self._in_place:
                parts.append(self._in_place[key](value, step(place, key), schema, depth))
            elif key in OF_TYPES and not is_typed:
                parts.append(self._typed(schema, place, depth))
                is_typed = True
        together = self.intersections.all_of(parts)
        if "oneOf" in schema:
            together = self._one_of(schema["oneOf"], together, step(place, "oneOf"), depth)
        return together

    def all_at(self, schemas: Any, place: str, depth: int) -> list[Union]:
        if not isinstance(schemas, list) or not schemas:
            wrong(place, "must be a list of schemas, not an empty one")
        return [self.read(schema, step(place, index), depth + 1) for index, schema in enumerate(schemas)]

    # -- schemas that apply to the same value -------------------------------------------------------------------------

    def _all_of(self, value: Any, place: str, _schema: Any, depth: int) -> Union:
        return self.intersections.all_of(self.all_at(value, place, depth))

    def _any_of(self, value: Any, place: str, _schema: Any, depth: int) -> Union:
        return unique(shape for union in self.all_at(value, place, depth) for shape in union)

    def _one_of(self, value: Any, besides: Union, place: str, depth: int) -> Union:
        options = [self.intersections.both(besides, option) for option in self.all_at(value, place, depth)]
        separate: Sequence[Union] | None = options
        if not self._is_lenient:
            separate = self._disjointness.separated([option for option in options if option])
        if separate is None:
            separate = self._each_without_others(value, options, place, depth)
        return unique(shape for option in separate for shape in option)

    def _each_without_others(self, schemas: list[Any], options: list[Union], place: str, depth: int) -> list[Union]:
        try:
            others = [self._negation.besides(one, step(place, index), depth + 1) for index, one in enumerate(schemas)]
        except SchemaError as error:
            raise SchemaError(place, "two of the schemas may hold at the same time; write anyOf") from error
        return [
            self.intersections.all_of([option, *others[:index], *others[index + 1 :]])
            for index, option in enumerate(options)
        ]

    def _ref(self, value: Any, place: str, _schema: Any, _depth: int) -> Union:
        return (Ref(frozenset({self._references.pointer(value, place)})),)

    def _if(self, condition: Any, place: str, schema: Mapping[str, Any], depth: int) -> Union:
        outer = place.removesuffix("/if")
        then, otherwise = (self.read(schema.get(key, True), step(outer, key), depth + 1) for key in ("then", "else"))
        if then == otherwise == ANYTHING:
            return ANYTHING
        both = self.intersections.both
        holds = both(self.read(condition, place, depth + 1), then) if then else NOTHING
        return unique(
            [*holds, *(both(self._negation.besides(condition, place, depth + 1), otherwise) if otherwise else ())]
        )

    def _not(self, value: Any, place: str, _schema: Any, depth: int) -> Union:
        return self._negation.besides(value, place, depth + 1)

    def _dependent(self, value: Any, place: str, _schema: Any, depth: int) -> Union:
        together, key = ANYTHING, place.rpartition("/")[2]
        for name, needed in mapping_at(value, place).items():
            where = step(place, name)
            is_list = isinstance(needed, list) if key == "dependencies" else key == "dependentRequired"
            if key == "dependencies" and not isinstance(needed, list | dict | bool):
                wrong(where, "must be a schema or a list of names")
            if is_list:
                then: Union = (Object(required=(name, *names_at(needed, where))),)
            else:
                then = self.intersections.both((Object(required=(name,)),), self.read(needed, where, depth + 1))
            either = unique([*NO_OBJECT, Object((Clause(((name, NOTHING),)),)), *then])
            together = self.intersections.both(together, either)
        return together

    def _enum(self, value: Any, place: str, _schema: Any, _depth: int) -> Union:
        if not isinstance(value, list):
            wrong(place, "must be a list")
        return unique(shape for index, one in enumerate(value) for shape in constant(one, step(place, index)))

    # -- the types ----------------------------------------------------------------------------------------------------

    def _typed(self, schema: Mapping[str, Any], place: str, depth: int) -> Union:
        named = schema.get("type", [name for name in TYPES if name != "integer"])
        names = [named] if isinstance(named, str) else named
        if not names or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            wrong(step(place, "type"), "must be a type, or a list of types")
        if unknown := [name for name in names if name not in TYPES]:
            wrong(step(place, "type"), f"Invalid type: {unknown[0][:50]}; the types are {', '.join(TYPES)}")
        shapes: list[Any] = []
        numbers, strings = numbers_of(schema, place), strings_of(schema, place)
        arrays, objects = self._arrays(schema, place, depth), self._objects(schema, place, depth)
        for name in names:
            match name:
                case "integer":
                    shapes += [] if "number" in names else self.intersections.both((Number(integer=True),), numbers)
                case "number":
                    shapes += numbers
                case "string":
                    shapes += strings
                case "array":
                    shapes += arrays
                case "object":
                    shapes += objects
                case _:
                    shapes += PLAIN[name]
        says_nothing = "type" not in schema and unique(shapes) == unique((*NO_OBJECT, Object()))
        return ANYTHING if says_nothing else unique(shapes)

    def _arrays(self, schema: Mapping[str, Any], place: str, depth: int) -> Union:
        least, most = (count_at(schema, key, place) for key in ("minItems", "maxItems"))
        least, most = self._contained(schema, place, least or 0, most)
        prefix, rest_key = "prefixItems", "items"
        if isinstance(schema.get("items"), list):
            prefix, rest_key = "items", "additionalItems"
        firsts = self.all_at(schema[prefix], step(place, prefix), depth) if schema.get(prefix) else []
        rest = self.read(schema.get(rest_key, True), step(place, rest_key), depth + 1)
        unevaluated = self._unevaluated(schema, "unevaluatedItems", ("contains",), place, depth)
        if unevaluated != ANYTHING and rest_key not in schema:
            rest = unevaluated
        is_unique = schema.get("uniqueItems", False)
        if not isinstance(is_unique, bool):
            wrong(step(place, "uniqueItems"), "must be true or false")
        if most is not None and least > most:
            return NOTHING
        return (Array(tuple(firsts), rest, least, most, is_unique, place),)

    def _contained(self, schema: Mapping[str, Any], place: str, least: int, most: int | None) -> tuple[int, int | None]:
        """Limits the number of items by the number of those that must be contained, if all items count."""
        if "contains" not in schema:
            return least, most
        at_least, at_most = (count_at(schema, key, place) for key in ("minContains", "maxContains"))
        contained = self.read(schema["contains"], step(place, "contains"))
        if contained != ANYTHING:
            if self._is_lenient or (at_least == 0 and at_most is None):
                return least, most
            wrong(step(place, "contains"), "contains cannot be guaranteed; describe the items by items or prefixItems")
        least = max(least, 1 if at_least is None else at_least)
        return least, at_most if most is None else min(most, most if at_most is None else at_most)

    def _objects(self, schema: Mapping[str, Any], place: str, depth: int) -> Union:
        least, most = (count_at(schema, key, place) for key in ("minProperties", "maxProperties"))
        properties = self._by_name(schema, "properties", place, depth)
        patterns = self._by_name(schema, "patternProperties", place, depth)
        for pattern, _ in patterns:
            check_pattern(pattern, step(place, "patternProperties", pattern))
        rest = None
        if "additionalProperties" in schema:
            rest = self.read(schema["additionalProperties"], step(place, "additionalProperties"), depth + 1)
        elif "unevaluatedProperties" in schema:
            rest = self._unevaluated(schema, "unevaluatedProperties", (), place, depth)
        else:
            self._unevaluated(schema, "unevaluatedProperties", (), place, depth)
        clause = Clause(properties, patterns, rest, "properties" in schema)
        required = schema.get("required", [])
        required = () if isinstance(required, bool) else names_at(required, step(place, "required"))  # of draft 3
        names = self._names_of(schema, place, depth)
        if most is not None and max(least or 0, len(set(required))) > most:
            return NOTHING
        clauses = (clause,) if clause != Clause() else ()
        return (Object(clauses, required, least or 0, most, names, place),)

    def _names_of(self, schema: Mapping[str, Any], place: str, depth: int) -> tuple[String | Literal, ...] | None:
        if "propertyNames" not in schema:
            return None
        union = self.read(schema["propertyNames"], step(place, "propertyNames"), depth + 1)
        strings = self.intersections.both((String(),), union)
        if String() in strings:
            return None
        return tuple(shape for shape in strings if isinstance(shape, String | Literal))

    def _unevaluated(
        self, schema: Mapping[str, Any], key: str, others: tuple[str, ...], place: str, depth: int
    ) -> Union:
        union = self.read(schema.get(key, True), step(place, key), depth + 1)
        if union != ANYTHING and self._is_lenient:
            return ANYTHING
        if union != ANYTHING and any(other in schema for other in (*IN_PLACE, *others)):
            wrong(step(place, key), f"{key} beside other schemas cannot be guaranteed; list what is allowed in one")
        return union

    def _by_name(self, schema: Mapping[str, Any], key: str, place: str, depth: int) -> tuple[tuple[str, Union], ...]:
        where = step(place, key)
        found = mapping_at(schema.get(key, {}), where)
        return tuple((name, self.read(value, step(where, name), depth + 1)) for name, value in found.items())

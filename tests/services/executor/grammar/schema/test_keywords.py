"""Keywords of JSON Schema, drafts 7 and 2020-12: those that demand nothing are accepted; others are honoured, or
refused with their place."""

import json
from typing import Any

import jsonschema
import pytest

from pagewire.services.executor.grammar.schema.errors import SchemaError
from pagewire.services.executor.grammar.schema.options import Options
from tests.services.executor.grammar.schema.outputs import admits

OPEN = Options(closes=False)
NO_DEMAND: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.com/a",
    "$anchor": "a",
    "$dynamicAnchor": "a",
    "$comment": "c",
    "$vocabulary": {"https://example.com/v": True},
    "$defs": {"a": False},
    "definitions": {"a": {"type": "null"}},
    "title": "t",
    "description": "d",
    "default": 7,
    "examples": [7],
    "deprecated": True,
    "readOnly": True,
    "writeOnly": True,
    "contentEncoding": "base64",
    "contentMediaType": "application/json",
    "contentSchema": {"type": "null"},
    "format": "colour",
    "discriminator": {"propertyName": "kind"},
    "nullable": True,
    "x-order": 1,
    "not": False,
    "allOf": [{}],
    "anyOf": [True, {"type": "null"}],
    "oneOf": [{}],
    "then": False,
    "else": False,
    "if": {"type": "object"},
    "dependentRequired": {},
    "dependentSchemas": {"a": True},
    "dependencies": {},
    "type": ["object", "array", "string", "number", "integer", "boolean", "null"],
    "properties": {},
    "patternProperties": {},
    "additionalProperties": True,
    "unevaluatedProperties": {},
    "propertyNames": {"type": "string"},
    "required": [],
    "minProperties": 0,
    "items": {},
    "prefixItems": [True],
    "additionalItems": False,
    "unevaluatedItems": True,
    "contains": {},
    "minContains": 5,
    "maxContains": 0,
    "uniqueItems": False,
    "minItems": 0,
    "minLength": 0,
    "maxLength": 1000,
    "minimum": -1e6,
}
BESIDE: dict[str, dict[str, Any]] = {"contains": {"minContains": 0}}
VALUES = ("7", "-1.5", '"x"', "true", "null", "[]", "[1,[null]]", "{}", '{"a":[1]}')


@pytest.mark.parametrize("keyword", NO_DEMAND)
def test_what_demands_nothing_is_accepted(keyword: str) -> None:
    schema = {keyword: NO_DEMAND[keyword]} | BESIDE.get(keyword, {})
    for value in VALUES:
        assert admits(schema, value, OPEN), value


@pytest.mark.parametrize("names", [True, {}, {"type": "string"}, {"minLength": 0}, {"type": ["string", "null"]}])
def test_names_that_are_any_text(names: Any) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "number"}}
    assert admits(schema, '{"a":1,"\\"é":2}') and not admits(schema, '{"a":"1"}')


POINT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
HONOURED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "not of a type": ({"not": {"type": ["object", "array"]}}, ["1", '"a"', "null"], ["{}", "[]"]),
    "not of values": ({"type": "string", "not": {"enum": ["a", 'q"']}}, ['"b"', '"aa"'], ['"a"', '"q\\""']),
    "not a number": ({"type": "integer", "not": {"const": 5}}, ["4", "6", "-5"], ["5"]),
    "not without a property": (POINT | {"not": {"required": ["a", "b"]}}, ["{}", '{"b":1}'], ['{"a":1,"b":1}']),
    "objects of a list": (
        {"enum": [{"a": 1, "b": [1, {}]}, {"a": 2}, "x"], "required": ["b"]},
        ['{"a":1,"b":[1,{}]}', '{ "a": 1, "b" : [1, { }]\n}', '"x"'],
        ['{"a":2}', '{"a":1}', "[1,{}]"],
    ),
    "an object of a list, or another": (
        {"anyOf": [*({"const": {"a": number}} for number in range(150)), POINT | {"required": ["b"]}, {"const": [1]}]},
        ['{"a":149}', '{"b":7}', "[1]"],
        ["[2]", '{"a":150}'],
    ),
    "nothing": ({"anyOf": [{"not": {}}, {"type": "null"}]}, ["null"], ["1"]),
    "if": (
        POINT | {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
        ["{}", '{"a":2}', '{"a":1,"b":1}', '{"b":3}'],
        ['{"a":1}'],
    ),
    "else": ({"if": {"type": "number"}, "then": {"minimum": 3}, "else": {"type": "null"}}, ["3", "null"], ["2", "{}"]),
    "dependent properties": (POINT | {"dependentRequired": {"a": ["b"]}}, ["{}", '{"b":1}'], ['{"a":1}']),
    "dependent schemas": (
        POINT | {"dependentSchemas": {"a": {"properties": {"b": {"maximum": 0}}}}},
        ['{"b":1}', '{"a":1,"b":0}', '{"a":1}'],
        ['{"a":1,"b":1}'],
    ),
    "dependencies": (POINT | {"dependencies": {"a": ["b"]}}, ['{"a":1,"b":1}'], ['{"a":1}']),
    "unevaluated properties": (POINT | {"unevaluatedProperties": False}, ['{"a":1}'], ['{"c":1}']),
    "unevaluated items": ({"type": "array", "prefixItems": [{}], "unevaluatedItems": False}, ["[1]"], ["[1,1]"]),
    "names of a list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"b":1}', '{"a":1,"b":2}'],
        ['{"c":1}', '{"a":"1"}'],
    ),
    "names of a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$", "maxLength": 2}},
        ['{"ab":1}'],
        ['{"A":1}', '{"abc":1}'],
    ),
    "patterns that overlap": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 5}}},
        ['{"ab":5}', '{"a":1}', '{"b":7}', '{"c":null}'],
        ['{"ab":4}', '{"ab":"x"}', '{"a":null}', '{"b":4}'],
    ),
    "a count of all": ({"type": "array", "contains": {}, "minContains": 2, "maxContains": 3}, ["[1,2]"], ["[1]", "[]"]),
    "a set": ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}, ['["b","a"]'], ['["a","a"]']),
    "at least some": (POINT | {"minProperties": 1, "additionalProperties": False}, ['{"b":1}'], ["{}"]),
    "at most some": (POINT | {"maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
    "bounds of draft 4": ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
    "items of draft 7": ({"type": "array", "items": [{"type": "null"}], "additionalItems": False}, ["[null]"], ["[1]"]),
    "anchors": ({"$defs": {"n": {"$anchor": "x", "type": "null"}}, "$ref": "#x"}, ["null"], ["1"]),
    "a dynamic reference": ({"$defs": {"n": {"$dynamicAnchor": "x", "const": 1}}, "$dynamicRef": "#x"}, ["1"], ["2"]),
    "its own address": ({"$id": "http://a/c", "$defs": {"n": {"const": 1}}, "$ref": "http://a/c#/$defs/n"}, ["1"], []),
    "one of the required": (
        POINT | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "additionalProperties": False},
        ['{"a":1}', '{"b":1}'],
        ["{}", '{"a":1,"b":1}'],
    ),
}  # fmt: skip
# Of which jsonschema's newest draft has another notion.
OLDER = {"dependencies", "bounds of draft 4", "items of draft 7"}


@pytest.mark.parametrize("name", HONOURED)
def test_what_is_honoured(name: str) -> None:
    schema, admitted, refused = HONOURED[name]
    for texts, is_valid in ((admitted, True), (refused, False)):
        for text in texts:
            assert admits(schema, text) == is_valid, text
            if name not in OLDER and not (name in ("unevaluated properties",) and is_valid):
                assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) == is_valid, text


REFUSED: list[tuple[Any, str, str]] = [
    ({"items": {"contains": {"type": "null"}}}, "/items/contains", "contains cannot be guaranteed"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "/properties/a/uniqueItems", "uniqueItems"),
    ({"not": {"pattern": "a"}}, "/not/pattern", "pattern cannot be negated"),
    ({"if": {"minLength": 2}, "then": False, "else": {"const": 1}}, "/if/minLength", "minLength cannot be negated"),
    ({"anyOf": [{"oneOf": [{"type": "integer"}, {"type": "number"}]}]}, "/anyOf/0/oneOf", "write anyOf"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "/unevaluatedProperties", "cannot be guaranteed"),
    ({"$ref": "https://example.com/b"}, "/$ref", "is not in the schema"),
    ({"$ref": "#/$defs/a"}, "/$ref", "nothing is at"),
    ({"items": {"type": "strin"}}, "/items/type", "Invalid type: strin"),
    ({"items": {"pattern": "(?=a)"}}, "/items/pattern", "look-around"),
    ({"patternProperties": {"(": {}}}, "/patternProperties/(", "unclosed group"),
    ({"properties": []}, "/properties", "must be an object"),
    ({"required": "a"}, "/required", "must be a list of names"),
    ({"minLength": -1}, "/minLength", "must be an integer that is not negative"),
    ({"maximum": "1"}, "/maximum", "must be a number"),
    ({"enum": 1}, "/enum", "must be a list"),
    ({"anyOf": []}, "/anyOf", "not an empty one"),
    ({"multipleOf": 0}, "/multipleOf", "must be greater than 0"),
    ({"type": []}, "/type", "must be a type, or a list of types"),
    ({"dependentRequired": {"a": "b"}}, "/dependentRequired/a", "must be a list of names"),
    ({"dependentRequired": {"a": {}}}, "/dependentRequired/a", "must be a list of names"),
    ({"dependentSchemas": {"a": ["b"]}}, "/dependentSchemas/a", "a schema must be an object"),
    ({"dependencies": {"a": "b"}}, "/dependencies/a", "must be a schema or a list of names"),
    ({"prefixItems": {}}, "/prefixItems", "must be a list of schemas"),
    ({"items": {}, "additionalItems": 5}, "/additionalItems", "a schema must be an object"),
    ({"minContains": "1"}, "/minContains", "must be an integer that is not negative"),
    ({"maxContains": -1}, "/maxContains", "must be an integer that is not negative"),
    ({"if": 5}, "/if", "a schema must be an object"),
    ({"items": {"then": 5}}, "/items/then", "a schema must be an object"),
    ({"$defs": 5}, "/$defs", "must be an object"),
    ({"definitions": []}, "/definitions", "must be an object"),
    ({"x-guidance": {"whitespace_pattern": "[ x]?"}}, "/x-guidance/whitespace_pattern", "it matches more than spaces"),
    ({"x-guidance": {"unknown": 1}}, "/x-guidance/unknown", "must be true or false"),
    ('{"items": {"const": ' + "9" * 5000 + "}}", "/items/const", "a number of 5000 digits cannot be written"),
    ('{"maximum": ' + "9" * 5000 + "}", "/maximum", "a number of 5000 digits is too long"),
    ('{"enum": [1e99999999999999999999999]}', "/enum/0", "digits cannot be written"),
    ({"type": "object", "properties": {"a": {"minProperties": 2, "type": "object"}}}, "/properties/a", "minProperties"),
    ({"items": {"type": "object", "properties": {f"k{i}": {} for i in range(1001)}}}, "/items", "at most 1000 are"),
    (
        {"type": "object", "properties": {f"k{i}": {} for i in range(999)}, "minProperties": 500},
        "",
        "minProperties and maxProperties need too many rules",
    ),
]


@pytest.mark.parametrize(("schema", "place", "message"), REFUSED)
def test_what_is_refused_has_its_place(schema: Any, place: str, message: str) -> None:
    with pytest.raises(SchemaError) as raised:
        admits(schema, "1")
    assert raised.value.place == place and message in raised.value.message


@pytest.mark.parametrize("schema", [{"contains": {"const": 1}}, {"not": {"pattern": "a"}}, {"oneOf": [{}, {}]}])
def test_lenient_schemas_leave_out_what_cannot_be_guaranteed(schema: dict[str, Any]) -> None:
    assert admits(schema | {"x-guidance": {"lenient": True}}, "[1]")


def test_nothing_matches_a_schema_that_never_ends() -> None:
    endless: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    never: list[Any] = [endless, {"$ref": "#"}, {"enum": []}, {"type": "integer", "const": "a"}, False]
    for schema in never:
        with pytest.raises(SchemaError, match="nothing matches it"):
            admits(schema, "{}")
    assert admits(endless | {"required": []}, '{"next":{"next":{}}}')


@pytest.mark.parametrize("number", [1234567890123456789, -(2**63), 2**64, 10**60, 0])
def test_integers_of_any_size_are_exact(number: int) -> None:
    schemas: list[dict[str, Any]] = [
        {"const": number},
        {"enum": [number]},
        {"type": "integer", "minimum": number, "maximum": number},
    ]
    for schema in schemas:
        assert admits(schema, str(number)) and not admits(schema, str(number + 1)) and not admits(schema, f"{number}0")
    at_least = {"type": "integer", "minimum": number}
    assert admits(at_least, str(number)) and not admits(at_least, str(number - 1))


def test_objects_are_closed_unless_something_is_said() -> None:
    opened = '{"a":1,"c":2}'
    assert not admits(POINT, opened) and admits(POINT, opened, OPEN)
    assert admits(POINT | {"additionalProperties": True}, opened) and admits({"type": "object"}, opened)
    both = {"allOf": [POINT, {"type": "object", "properties": {"c": {"type": "integer"}}}]}
    assert admits(both, opened) and not admits(both, '{"d":1}')
    assert not admits({"type": "object", "properties": {}}, opened)
    own = POINT | {"x-guidance": {"disable_additional_properties": True}}
    assert not admits(own, opened, OPEN)


def test_json_that_nothing_describes_is_bounded() -> None:
    objects, arrays = {"type": "object"}, {"type": "array"}
    for schema in (objects, {}, {"type": "array"}):
        begin, end = ("[", "]") if schema == arrays else ("", "")
        pairs = ",".join(f'"k{index}":1' for index in range(100))
        assert admits(schema, f"{begin}{{{pairs}}}{end}") and not admits(schema, f'{begin}{{{pairs},"k":1}}{end}')
        assert admits(schema, begin + json.dumps({"k" * 128: 1}, separators=(",", ":")) + end)
        assert not admits(schema, begin + json.dumps({"k" * 129: 1}, separators=(",", ":")) + end)
    assert admits(arrays, f"[{','.join(['1'] * 1000)}]") and not admits(arrays, f"[{','.join(['1'] * 1001)}]")
    declared = objects | {"additionalProperties": {"type": "integer"}}
    assert admits(declared, f"{{{','.join(f'{json.dumps(str(index))}:1' for index in range(200))}}}")

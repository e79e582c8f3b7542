"""JSON schemas as people write them, each bounded so that a model of random weights comes to its end."""

from typing import Any

WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}
SHORT = {"type": "string", "maxLength": 5}
CLOSED = {"additionalProperties": False}


def an_object(required: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": required, "required": list(required)} | CLOSED | more


SCHEMAS: dict[str, Any] = {
    "nothing": an_object({}),
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "constant": {"const": {"a": [1, "b", None]}},
    "mixed enum": {"enum": ["a", 1, 2.5, None, True, ["x"], {"k": "v"}]},
    "integer range": {"type": "integer", "minimum": -17, "maximum": 1234},
    "exclusive range": {"type": "integer", "exclusiveMinimum": 5, "exclusiveMaximum": 9},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 1.25},
    "multiple of": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    "several types": {"type": ["boolean", "null"]},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 4},
    "anchored pattern": {"type": "string", "pattern": "^(\\+?[0-9]{2,4})(-[0-9]{3})?$"},
    "pattern with unicode": {"type": "string", "pattern": "^[äöüß€🙂]{1,3}$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "unknown format": {"type": "string", "format": "colour", "maxLength": 3},
    "optional properties": {"type": "object", "properties": {"a": WORD, "b": WORD, "c": {"type": "null"}}} | CLOSED,
    "keys to be escaped": an_object({'a "quoted" \n key': {"type": "null"}, "ключ 🙂": {"type": "boolean"}}),
    "nested": an_object({"a": an_object({"b": an_object({"c": {"type": "array", "items": WORD, "maxItems": 2}})})}),
    "tuple": {"type": "array", "prefixItems": [WORD, {"type": "boolean"}], "items": False, "minItems": 2},
    "item counts": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "any of": {"anyOf": [an_object({"a": WORD}), an_object({"b": {"type": "boolean"}})]},
    "discriminated": {
        "oneOf": [an_object({"kind": {"const": "cat"}, "meows": WORD}), an_object({"kind": {"const": "dog"}})],
        "discriminator": {"propertyName": "kind"},
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]},
    "references": an_object({"a": {"$ref": "#/$defs/word"}}, **{"$defs": {"word": WORD}}),
    "old references": an_object(
        {"a": {"$ref": "#/definitions/w"}}, definitions={"w": {"$ref": "#/definitions/v"}, "v": WORD}
    ),
    "recursion": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": an_object(
                {"next": {"anyOf": [{"type": "null"}, {"type": "null"}, {"type": "boolean"}, {"$ref": "#/$defs/node"}]}}
            )
        },
    },
    "of pydantic": {
        "$defs": {"Kind": {"enum": ["A", "B"], "title": "Kind", "type": "string"}},
        "properties": {
            "kind": {"allOf": [{"$ref": "#/$defs/Kind"}], "description": "which", "default": "A"},
            "size": {"anyOf": [{"maximum": 99, "minimum": 0, "type": "integer"}, {"type": "null"}], "title": "Size"},
        },
        "required": ["kind", "size"],
        "title": "Thing",
        "type": "object",
        "additionalProperties": False,
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.com/thing.json",
        "$comment": "none of these means anything",
        "title": "Thing",
        "description": "a thing",
        "examples": [{"a": "b"}],
        "deprecated": True,
        "readOnly": True,
    }
    | an_object({"a": SHORT}),
    "pattern properties": {"type": "object", "patternProperties": {"^x[0-9]$": {"type": "null"}}} | CLOSED,
}

"""Validation of request bodies in bounded time: what is wrong a million times is reported once.

pydantic reports every violation, so a list of a million wrong elements makes a million errors, which take seconds and
gigabytes. In a `BoundedModel`, lists end at their first wrong item, maps are validated in pieces, and objects have a
bounded number of members. The number of errors is then bounded by the schema, not by the body.
"""

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, cast

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

# Items of a list other than numbers and texts, such as messages or parts of their content.
MAX_OBJECTS_IN_LIST = 10_000
# Members of an object of a declared type, which has a hundred fields or so.
MAX_OBJECT_MEMBERS = 1_000
_OPAQUE = frozenset({"metadata", "config", "cls", "default", "serialization", "expected"})
_HAS_BOUNDS = "pagewire_has_bounds"
_PIECE = 16  # members of a map that are validated at once
_SCALARS = frozenset({"int", "float", "str", "bool", "literal", "any", "constrained-str"})


def _bounded(schema: Any, owner: type[BaseModel]) -> Any:
    """Returns a copy of a part of a model's schema, with bounds on what it reports."""
    if isinstance(schema, list):
        return [_bounded(part, owner) for part in schema]
    if isinstance(schema, tuple):
        return tuple(_bounded(part, owner) for part in schema)
    if not isinstance(schema, Mapping):
        return schema
    kind = schema.get("type")
    if kind == "model" and schema["cls"] is not owner:
        return schema  # it has bounds of its own
    if not isinstance(kind, str):  # a map of fields, one of which may have the name "type" or "metadata"
        return {key: _bounded(value, owner) for key, value in schema.items()}
    copy = {key: value if key in _OPAQUE else _bounded(value, owner) for key, value in schema.items()}
    return _RULES[kind](copy) if kind in _RULES else copy


def _list(schema: dict[str, Any]) -> dict[str, Any]:
    items = schema.get("items_schema", {"type": "any"})
    if not _is_scalar(items):
        schema["max_length"] = min(schema.get("max_length") or MAX_OBJECTS_IN_LIST, MAX_OBJECTS_IN_LIST)
    return schema | {"fail_fast": True}


def _before(schema: dict[str, Any]) -> Any:
    """Bounds a list in front of our own functions, which look at each of its items."""
    inner = schema["schema"]
    while inner["type"].startswith("function-"):
        inner = inner["schema"]
    if inner["type"] != "list" or "max_length" not in inner:
        return schema
    return core_schema.no_info_before_validator_function(_check_items, cast(CoreSchema, schema))


def _check_items(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MAX_OBJECTS_IN_LIST:
        raise PydanticCustomError(
            "too_many_items",
            "List should have at most {limit} items, not {count}",
            {"limit": MAX_OBJECTS_IN_LIST, "count": len(value)},
        )
    return value


def _is_scalar(schema: Mapping[str, Any]) -> bool:
    """Returns whether values may be numbers or texts, or lists of these, of which there are many."""
    if schema["type"] == "union":
        choices = (choice[0] if isinstance(choice, tuple) else choice for choice in schema["choices"])
        return any(map(_is_scalar, choices))
    inner = schema.get("items_schema") if schema["type"] == "list" else schema.get("schema")
    return schema["type"] in _SCALARS or (isinstance(inner, Mapping) and _is_scalar(inner))


def _map(schema: dict[str, Any]) -> CoreSchema:
    limit = schema.get("max_length", math.inf)

    def validate_in_pieces(value: Any, validate: Callable[[Any], Any]) -> Any:
        if not isinstance(value, dict) or (len(value) <= _PIECE and len(value) <= limit):
            return validate(value)
        if len(value) > limit:  # pydantic would look at the members first
            known = {"field_type": "Dictionary", "max_length": limit, "actual_length": len(value)}
            raise PydanticKnownError("too_long", known)
        members, found = iter(value.items()), {}
        while piece := dict(islice(members, _PIECE)):
            found.update(validate(piece))
        return found

    return core_schema.no_info_wrap_validator_function(validate_in_pieces, cast(CoreSchema, schema))


def _object(schema: dict[str, Any]) -> CoreSchema:
    """Bounds the members, and drops unknown ones that are null: clients write out what is unset."""
    fields = schema["fields"]
    known = {*fields, *(field.get("validation_alias") for field in fields.values())}

    def check_members(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_OBJECT_MEMBERS:
            raise PydanticCustomError(
                "too_many_members",
                "Object should have at most {limit} members, not {count}",
                {"limit": MAX_OBJECT_MEMBERS, "count": len(value)},
            )
        if value.keys() <= known:
            return value
        return {name: member for name, member in value.items() if member is not None or name in known}

    return core_schema.no_info_before_validator_function(check_members, cast(CoreSchema, schema))


_RULES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "list": _list,
    "set": lambda schema: schema | {"fail_fast": True},
    "frozenset": lambda schema: schema | {"fail_fast": True},
    "tuple": lambda schema: schema | {"fail_fast": True},
    "dict": _map,
    "model-fields": _object,
    "typed-dict": _object,
    "function-before": _before,
    "function-wrap": _before,
}


class BoundedModel(BaseModel):
    """The base of every object in a request."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        own: Any = handler.resolve_ref_schema(schema)
        if not own.get("metadata", {}).get(_HAS_BOUNDS):  # the schema of a class is made once, and asked for often
            own.update(_bounded(own, cls))
            own["metadata"] = own.get("metadata", {}) | {_HAS_BOUNDS: True}
        return schema

"""Validation of request bodies in bounded time: what is wrong a million times is reported once.

pydantic reports every violation, so a list of a million wrong elements makes a million errors, which take seconds and
gigabytes. In a `BoundedModel`, lists end at their first wrong item, maps are validated in pieces, and objects have a
bounded number of members. The number of errors is then bounded by the schema, not by the body.
"""

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, ClassVar, cast

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from pagewire.gateway.core.reading.names import Refused, check_names
from pagewire.gateway.core.validation import BRANCH, TAGGED

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
    if kind == "model-fields":
        return _object(copy, owner)
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


def _object(schema: dict[str, Any], owner: type[BaseModel]) -> CoreSchema:
    """Looks at the names of an object before its values."""
    known = {one.get("validation_alias", name) for name, one in schema["fields"].items()}
    unsupported = getattr(owner, "unsupported", {})
    takes_any = owner.model_config.get("extra") != "forbid"

    def only_known(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_OBJECT_MEMBERS:
            raise PydanticCustomError(
                "too_many_members",
                "Object should have at most {limit} members, not {count}",
                {"limit": MAX_OBJECT_MEMBERS, "count": len(value)},
            )
        return check_names(value, known, unsupported, takes_any=takes_any)

    return core_schema.no_info_before_validator_function(only_known, cast(CoreSchema, schema))


def _union(schema: dict[str, Any]) -> dict[str, Any]:
    choices = (choice[0] if isinstance(choice, tuple) else choice for choice in schema["choices"])
    return schema | {"choices": [(choice, BRANCH) for choice in choices]}


def _tagged_union(schema: dict[str, Any]) -> dict[str, Any]:
    branches = {
        tag: core_schema.union_schema([(choice, TAGGED)], auto_collapse=False, mode="left_to_right")
        for tag, choice in schema["choices"].items()
    }
    return schema | {"choices": branches}


_RULES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "list": _list,
    "set": lambda schema: schema | {"fail_fast": True},
    "frozenset": lambda schema: schema | {"fail_fast": True},
    "tuple": lambda schema: schema | {"fail_fast": True},
    "dict": _map,
    "union": _union,
    "tagged-union": _tagged_union,
    "function-before": _before,
    "function-wrap": _before,
}


class BoundedModel(BaseModel):
    """The base of every object in a request."""

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        own: Any = handler.resolve_ref_schema(schema)
        if not own.get("metadata", {}).get(_HAS_BOUNDS):  # the schema of a class is made once, and asked for often
            own.update(_bounded(own, cls))
            own["metadata"] = own.get("metadata", {}) | {_HAS_BOUNDS: True}
        return schema

"""Values without quotes, which are text or JSON by their schema, and their formats in a grammar."""

import ast
import json
import warnings
from collections.abc import Mapping
from typing import Any

from pagewire.services.tokenizer.parsers.shared.formats import (
    ANY_TEXT,
    CallableTool,
    Format,
    FormatError,
    json_of,
    one_of,
    text_of,
)
from pagewire.services.tokenizer.parsers.shared.json_repair import repaired
from pagewire.services.tokenizer.parsers.shared.keywords import Parameter

# Keys that do not restrict a value.
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$defs", "definitions", "$comment", "x-guidance"}
)


def is_text(schema: Any) -> bool:
    """Returns whether every value is a string."""
    return _types(schema) == {"string"}


def to_json(text: str, schema: Any) -> str:
    """Returns a value as JSON. A value that is JSON stays as it was written."""
    types = _types(schema)
    stripped = text.strip()
    if "string" in types and not ("null" in types and stripped == "null"):
        return json.dumps(text, ensure_ascii=False)
    for written in (stripped, repaired(stripped)):
        try:
            json.loads(written, parse_constant=_no_json)
            return written
        except (ValueError, RecursionError):
            pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of doubtful escapes
            return json.dumps(ast.literal_eval(stripped), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _types(schema: Any) -> set[str]:
    """Returns the types that a schema allows; none if it does not restrict them."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values and all(isinstance(value, str) for value in values):
        return {"string"}
    branches = schema.get("anyOf") or schema.get("oneOf") or []
    return {one for branch in branches for one in _types(branch)}


def resolved(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Returns a schema, or the one that it refers to. definitions: the schema with the definitions."""
    seen: set[str] = set()
    while isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        found: Any = definitions
        for key in reference.removeprefix("#/").split("/"):
            found = found.get(key) if isinstance(found, dict) else None
        schema = found
    return schema


def value_format(tool: CallableTool, parameter: Parameter) -> Format:
    """Returns the format of an argument. Raises FormatError for restricted strings, as no mark shows their end."""
    schema = resolved(parameter.schema, parameter.schema)
    types = _types(schema)
    if "string" not in types:
        return json_of(parameter.schema)
    if _takes_any_text(schema):
        return ANY_TEXT
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if values and all(isinstance(value, str) for value in values):
        return one_of(*map(text_of, values))
    raise FormatError(
        f"tool {tool.name!r} is strict, but this model writes strings without quotes, so the schema of "
        f"{parameter.name!r} cannot be enforced; leave strict out, or make it a plain string or an enum"
    )


def _takes_any_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    keys = set(schema) - _ANNOTATIONS
    if keys == {"type"}:
        return "string" in _types(schema)
    return keys in ({"anyOf"}, {"oneOf"}) and any(map(_takes_any_text, schema.get("anyOf") or schema["oneOf"]))

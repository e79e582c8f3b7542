"""Parameters of tools, from the schema of their object, for models that write each argument under its name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagewire.services.tokenizer.parsers.shared.formats import (
    CallableTool,
    Format,
    FormatError,
    one_of,
    optional,
    sequence,
    text_of,
)

_DEFINITIONS = ("$defs", "definitions")
# Keys that do not relate several arguments.
_HARMLESS = frozenset(
    {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
    | {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment", "x-guidance"}
)


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool."""

    name: str
    schema: Mapping[str, Any]
    is_required: bool


def parameters_of(tool: CallableTool) -> list[Parameter] | None:
    """Returns the parameters in the schema's order; None if the schema has none. Raises FormatError."""
    schema = tool.schema
    if set(schema) <= {"type", "x-guidance"}:
        return None
    if unknown := sorted(set(schema) - _HARMLESS):
        raise _cannot(tool, f"{unknown[0]!r}, which is about several arguments at once")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or not set(required) <= set(properties):
        raise _cannot(tool, "'required' or 'properties' as it stands")
    definitions = definitions_of(tool)
    return [
        Parameter(name, {**(value if isinstance(value, dict) else {}), **definitions}, name in required)
        for name, value in properties.items()
    ]


def definitions_of(tool: CallableTool) -> dict[str, Any]:
    """Returns the definitions of a tool's schema, for parts of it that move elsewhere. Raises FormatError."""
    for reference in _references(tool.schema):
        if not reference.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS)):
            raise _cannot(tool, f"the reference {reference!r}")
    return {key: tool.schema[key] for key in _DEFINITIONS if key in tool.schema}


def _references(value: Any) -> list[str]:
    if isinstance(value, list):
        return [found for item in value for found in _references(item)]
    if not isinstance(value, dict):
        return []
    own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
    return own + [found for item in value.values() for found in _references(item)]


def in_order(parameters: Sequence[Parameter], written: Callable[[Parameter], Format], separator: str) -> Format:
    """Returns a format of all required parameters and any of the others, in their order."""
    formats = [written(parameter) for parameter in parameters]
    required = [parameter.is_required for parameter in parameters]
    behind = [sequence(text_of(separator), one) for one in formats]
    rest = [one if needed else optional(one) for one, needed in zip(behind, required, strict=True)]
    if True in required:
        first = required.index(True)
        before = [optional(sequence(one, text_of(separator))) for one in formats[:first]]
        return sequence(*before, formats[first], *rest[first + 1 :])
    begun = [sequence(one, *rest[index + 1 :]) for index, one in enumerate(formats)]
    return one_of(*begun, text_of(""))


def _cannot(tool: CallableTool, what: str) -> FormatError:
    return FormatError(
        f"tool {tool.name!r} is strict, but the format of this model's calls cannot express a part of its schema: "
        f"{what}; leave strict out, or simplify the schema"
    )

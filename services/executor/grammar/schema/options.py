"""Options of following a schema, which the request, the schema's `x-guidance` or the server sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagewire.services.executor.grammar.schema.errors import SchemaError, step, wrong
from pagewire.services.executor.grammar.schema.texts import whitespace

# Whitespace in one place is limited to a space, or a new line with the indentation of deep nesting: a model that has
# begun may never stop.
WHITESPACE = r"(?:[\x20\x09]|\x0D?\x0A[\x20\x09]{0,32})"
_KEY = "x-guidance"


@dataclass(frozen=True)
class Options:
    """The options of one schema.

    whitespace: a regular expression for what may stand where JSON allows whitespace; None for nothing.
    closes: objects have no properties besides those that a schema declares, unless the schema says so.
    is_lenient: what cannot be guaranteed is left out instead of refused.
    """

    whitespace: str | None = WHITESPACE
    closes: bool = True
    is_lenient: bool = False

    def with_own(self, schema: Any) -> Options:
        """Returns the options with those that the schema states itself. Raises SchemaError."""
        own = schema.get(_KEY, {}) if isinstance(schema, dict) else {}
        options = self
        if not isinstance(own, Mapping):
            wrong(step("", _KEY), "must be an object")
        for key, value in own.items():
            options = replace(options, **_changed(key, value, options))
        return options


def _changed(key: str, value: Any, options: Options) -> dict[str, Any]:
    if value is None:
        return {}
    kind = str if key == "whitespace_pattern" else bool
    if not isinstance(value, kind):
        wrong(step("", _KEY, key), f"must be {'a text' if kind is str else 'true or false'}")
    match key:
        case "whitespace_pattern" if isinstance(value, str):
            return {"whitespace": whitespace(value, step("", _KEY, key)) or None}
        case "whitespace_flexible":
            return {"whitespace": (options.whitespace or WHITESPACE) if value else None}
        case "lenient" | "coerce_one_of":
            return {"is_lenient": options.is_lenient or value}
        case "disable_additional_properties":
            return {"closes": value}
    known = "whitespace_pattern, whitespace_flexible, lenient and disable_additional_properties"
    raise SchemaError(step("", _KEY, key), f"this option is unknown; {known} are possible")

"""Finds where a body can be long: every list, map, text and number of its JSON schema."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ITEM = 0  # a step of a path: into a list
KEY = "0"  # likewise, into a map; some have ids of tokens as keys
KINDS = ("array", "map", "string", "number", "integer")


@dataclass(frozen=True)
class Place:
    """A value in a body."""

    path: tuple[str | int, ...]  # keys, and ITEM
    kind: str  # of KINDS

    def body(self, value: Any) -> Any:
        """Returns a body that holds the value at this place, and nothing else."""
        for step in reversed(self.path):
            value = [value] if step == ITEM else {step: value}
        return value

    def __str__(self) -> str:
        return "".join(f".{step}" if isinstance(step, str) else "[]" for step in self.path).removeprefix(".")


def places(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Place]:
    """Returns all places below a schema, those of unions once each. definitions: by the last part of a `$ref`."""
    return [*dict.fromkeys(_places(schema, definitions, (), ()))]


def _places(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], path: tuple[str | int, ...], refs: tuple[str, ...]
) -> Iterator[Place]:
    if (ref := schema.get("$ref")) is not None:
        name = ref.rpartition("/")[2]
        if name not in refs:  # a schema in itself has the same places again
            yield from _places(definitions[name], definitions, path, (*refs, name))
        return
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from _places(part, definitions, path, refs)
    kind = schema.get("type")
    if kind in KINDS:
        yield Place(path, kind)
    if kind == "array" and isinstance(items := schema.get("items"), Mapping):
        yield from _places(items, definitions, (*path, ITEM), refs)
    for name, part in schema.get("properties", {}).items():
        yield from _places(part, definitions, (*path, name), refs)
    values = [schema.get("additionalProperties", kind == "object"), *schema.get("patternProperties", {}).values()]
    if any(values) and kind == "object":
        yield Place(path, "map")
    for part in values:
        if isinstance(part, Mapping):
            yield from _places(part, definitions, (*path, KEY), refs)

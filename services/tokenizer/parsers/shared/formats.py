"""Formats of calls as structural tags, from which the executor makes the grammar of an output."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Format = dict[str, Any]

ANY_TEXT: Format = {"type": "any_text"}
# Of JSON in calls: small models fill lines with white space wherever it is allowed.
WHITESPACE = " ?"


class FormatError(ValueError):
    """A schema cannot be followed between the marks of calls. The message names the tool and the reason."""


@dataclass(frozen=True)
class CallableTool:
    """A function that the model may call."""

    name: str
    # JSON schema of its arguments, an object.
    schema: Mapping[str, Any]

    @property
    def json_name(self) -> str:
        return json.dumps(self.name, ensure_ascii=False)

    @property
    def arguments(self) -> Format:
        """The arguments as a JSON object."""
        return json_of(self.schema)


def json_of(schema: Mapping[str, Any]) -> Format:
    """Returns JSON that follows a schema. Its x-guidance has settings of the grammar's engine."""
    return {"type": "json_schema", "json_schema": {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}}


def text_of(value: str) -> Format:
    return {"type": "const_string", "value": value}


def regex_of(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def any_text_but(excludes: Sequence[str]) -> Format:
    return {"type": "any_text", "excludes": list(excludes)}


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def one_of(*elements: Format) -> Format:
    return {"type": "or", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def any_number_of(content: Format) -> Format:
    return {"type": "star", "content": content}


def tag(begin: str, content: Format, end: str) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def listed(tags: Iterable[Format], separator: str, *, only_one: bool) -> Format:
    """Returns a list of the tags, or one of them if only_one, and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }


def amid_text(triggers: Sequence[str], tags: Iterable[Format], *, only_one: bool, excludes: Sequence[str]) -> Format:
    """Returns text without `excludes`; each trigger in it begins one of the tags. only_one: it ends with the first."""
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": list(tags),
        "excludes": list(excludes),
        "at_least_one": False,
        "stop_after_first": only_one,
    }

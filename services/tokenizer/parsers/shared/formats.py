"""What calls look like, as structural tags: from them the executor makes the grammar of an output."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Format = dict[str, Any]

ANY_TEXT: Format = {"type": "any_text"}
# Of JSON in calls: small models fill up lines with white space wherever they may.
WHITESPACE = " ?"


class FormatError(ValueError):
    """The marks around calls do not allow to say what a schema does; the message names the tool and the reason."""


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
        """As a JSON object."""
        return json_of(self.schema)


def json_of(schema: Mapping[str, Any]) -> Format:
    """x-guidance in a schema is what the grammar's engine does otherwise than by default."""
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
    """One of the tags or, unless only one is wanted, several, and nothing else."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": only_one,
    }


def amid_text(triggers: Sequence[str], tags: Iterable[Format], *, only_one: bool, excludes: Sequence[str]) -> Format:
    """Text without `excludes`, in which each trigger begins one of the tags. only_one: it ends with the first."""
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": list(tags),
        "excludes": list(excludes),
        "at_least_one": False,
        "stop_after_first": only_one,
    }

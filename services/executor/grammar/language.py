"""Translation of the grammars that clients write to llguidance's language, with errors that name the place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.services.executor.grammar.errors import MAX_ERROR_LENGTH, GrammarError
from pagewire.services.executor.grammar.marks import Marks
from pagewire.services.executor.grammar.structural_tag import from_structural_tag
from pagewire.v1.common_pb2 import Grammar

# Values of `format` that are checked; no other needs to be (JSON Schema 2020-12, validation, section 7.2.1).
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
# Whitespace in one place is limited to the indentation of deep nesting: a model that has begun may never stop.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Keys of a schema that hold data, and keys that hold a schema per name.
_DATA = frozenset({"const", "enum", "default", "examples", "required", "type"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def to_llguidance(grammar: Grammar, marks: Marks) -> str:
    """Returns the grammar in llguidance's language. marks: the vocabulary's.

    Raises GrammarError for an error of form; errors of content appear when the grammar is compiled.
    """
    form = grammar.WhichOneof("form")
    if form == "json_schema":
        return _from_schema(grammar)
    if form == "regex":
        return LLMatcher.grammar_from_regex(grammar.regex)
    if form == "choice":
        # One terminal: as alternatives of a rule, the parser would take no more than 2,000.
        texts = " | ".join(json.dumps(text) for text in grammar.choice.texts)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if form == "ebnf":
        return _from_ebnf(grammar.ebnf)
    if form == "structural_tag":
        return from_structural_tag(grammar.structural_tag, marks, _prepared_part)
    raise GrammarError("grammar is empty; set one of json_schema, regex, choice, ebnf and structural_tag")


def describe_error(grammar: Grammar, error: str) -> str:
    """Returns the message for the client about an error of llguidance."""
    form = grammar.WhichOneof("form") or "grammar"
    # After the first paragraph llguidance repeats the grammar, which here is not the client's own text.
    lines = error.replace("<non-verbose/>", "").splitlines()
    if form == "structural_tag":
        lines = [*takewhile(lambda line: not re.match(r"\s*\d+ \| ", line), lines)]
        lines[0] = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", lines[0])
    text = " ".join(line.strip() for line in lines if line.strip())
    place = next(filter(None, (_place(where, schema, text) for where, schema in _roots(grammar))), "")
    if text == "NoExtensionBias":
        text = "nothing matches it"
    if "oneOf constraints are not supported" in text:
        text = "oneOf with schemas that may hold at the same time; write anyOf"
    return f"{form}{f' at {place}' if place else ''}: {text[:MAX_ERROR_LENGTH]}"


# -- JSON schema -----------------------------------------------------------------------------------------------------


def _from_schema(grammar: Grammar) -> str:
    try:
        schema = json.loads(grammar.json_schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("json_schema must be an object, true or false")
    options: dict[str, Any] = {"whitespace_pattern": _WHITESPACE}
    if grammar.HasField("whitespace_pattern"):
        options["whitespace_pattern"] = grammar.whitespace_pattern
    elif grammar.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    schema = _as_object(schema)
    _drop_unknown_formats(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]


def _as_object(schema: Any) -> Any:
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return schema


def _prepared_part(schema: Any) -> dict[str, Any]:
    """A schema in a larger grammar; the schema itself states how whitespace is treated."""
    schema = _as_object(schema)
    _drop_unknown_formats(schema)
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE} | (own if isinstance(own, dict) else {})}


def _drop_unknown_formats(schema: Any) -> None:
    for _, part in schemas(schema):
        if isinstance(part.get("format"), str) and part["format"] not in _FORMATS:
            del part["format"]


def schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (JSON pointer, schema) of a schema that was read from JSON, and of all schemas within it."""
    pending: list[tuple[str, Any]] = [("", schema)]
    while pending:
        pointer, part = pending.pop()
        if isinstance(part, list):
            pending += [(f"{pointer}/{index}", item) for index, item in reversed(list(enumerate(part)))]
        if not isinstance(part, dict):
            continue
        yield pointer, part
        for key, value in reversed(part.items()):
            where = f"{pointer}/{_escaped(key)}"
            if key in _NAMED_SCHEMAS and isinstance(value, dict):
                pending += [(f"{where}/{_escaped(name)}", item) for name, item in reversed(value.items())]
            elif key not in _DATA:
                pending.append((where, value))


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _roots(grammar: Grammar) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, schema) of each schema that the grammar has."""
    if grammar.HasField("json_schema"):
        yield "", json.loads(grammar.json_schema)
    elif grammar.HasField("structural_tag"):
        for pointer, part in schemas(json.loads(grammar.structural_tag)):
            yield from ((f"{pointer}/{key}", part[key]) for key in ("json_schema", "schema") if key in part)


def _place(where: str, schema: Any, error: str) -> str:
    """Returns a JSON pointer to the cause of an error, which llguidance does not give; "" if it is not found."""
    for pointer, part in schemas(schema):
        pointer = where + pointer
        for key, value in part.items():
            if key in ("pattern", "$ref") and isinstance(value, str) and value and value.strip("^$#") in error:
                return f"#{pointer}/{_escaped(key)}"
            if error.startswith("Unimplemented keys") and json.dumps(key) in error:
                return f"#{pointer}/{_escaped(key)}"
            if error.startswith("oneOf constraints") and key == "oneOf":
                return f"#{pointer}/oneOf"
            if key == "type" and error.startswith(("Invalid type", "type must")) and not _is_type(value):
                return f"#{pointer}/type"
    return ""


def _is_type(value: Any) -> bool:
    types = {"null", "boolean", "object", "array", "number", "integer", "string"}
    return all(isinstance(name, str) and name in types for name in (value if isinstance(value, list) else [value]))


# -- other languages -------------------------------------------------------------------------------------------------


def _from_ebnf(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # the conversion from GBNF may raise anything
        raise GrammarError(f"ebnf: {str(error)[:MAX_ERROR_LENGTH]}") from error

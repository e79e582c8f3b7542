"""From the languages that clients write grammars in to the one of llguidance, with errors that name the place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.v1.common_pb2 import Grammar

MAX_ERROR_LENGTH = 400
# Of `format`; any other says nothing that has to be checked (JSON Schema 2020-12, validation, section 7.2.1).
_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
# In one place at most as much as indents deep nesting: a model that has begun to write whitespace may never stop.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Keys of a schema whose values are no schemas, and those with a schema per name.
_DATA = frozenset({"const", "enum", "default", "examples", "required", "type"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


class GrammarError(ValueError):
    """A grammar that cannot be used; the message says what is wrong, and where."""


class SlowGrammarError(GrammarError):
    """One that takes too long to compile, at this time."""


def to_llguidance(grammar: Grammar) -> str:
    """Raises GrammarError for what is wrong in its form; what is wrong in its content shows when it is compiled."""
    form = grammar.WhichOneof("form")
    if form == "json_schema":
        return _from_schema(grammar)
    if form == "regex":
        return LLMatcher.grammar_from_regex(grammar.regex)
    if form == "choice":
        texts = grammar.choice.texts
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in texts))
    if form == "ebnf":
        return _from_ebnf(grammar.ebnf)
    if form == "structural_tag":
        return _from_structural_tag(grammar.structural_tag)
    raise GrammarError("grammar says nothing; set one of json_schema, regex, choice, ebnf and structural_tag")


def describe_error(grammar: Grammar, error: str) -> str:
    """What a client reads of an error in llguidance's words."""
    form = grammar.WhichOneof("form") or "grammar"
    place = _place(json.loads(grammar.json_schema), error) if form == "json_schema" else ""
    # Behind the first paragraph llguidance repeats the grammar.
    text = " ".join(line.strip() for line in error.replace("<non-verbose/>", "").splitlines() if line.strip())
    if text == "NoExtensionBias":
        text = "nothing matches it"
    if "oneOf constraints are not supported" in text:
        text = "oneOf whose schemas may hold at the same time; write anyOf"
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
    for _, part in schemas(schema):
        if isinstance(part.get("format"), str) and part["format"] not in _FORMATS:
            del part["format"]
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]


def schemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON pointer, schema) of a schema that was read from JSON, and of all within it."""
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


def _place(schema: Any, error: str) -> str:
    """A JSON pointer to what an error speaks of; "" if that is not found. llguidance itself does not say."""
    for pointer, part in schemas(schema):
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
    except Exception as error:  # of the conversion from GBNF, which raises whatever it comes upon
        raise GrammarError(f"ebnf: {str(error)[:MAX_ERROR_LENGTH]}") from error


def _from_structural_tag(text: str) -> str:
    try:
        value = json.loads(text)
        triggers = [str(trigger) for trigger in value["triggers"]]
        tags = [_tag(structure, triggers, index) for index, structure in enumerate(value["structures"])]
    except (ValueError, RecursionError) as error:
        raise GrammarError(error.args[0] if isinstance(error, GrammarError) else f"structural_tag: {error}") from error
    except (KeyError, TypeError) as error:
        raise GrammarError(
            'structural_tag must be {"triggers": [TEXT, ...], "structures": [{"begin": TEXT, "schema": SCHEMA, "end": '
            f"TEXT}}, ...]}}: {error}"
        ) from error
    if not tags:
        raise GrammarError("structural_tag: structures is empty")
    return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False))


def _tag(structure: Any, triggers: list[str], index: int) -> StructTag:
    begin, end = str(structure["begin"]), str(structure["end"])
    trigger = next((trigger for trigger in triggers if trigger and begin.startswith(trigger)), None)
    if trigger is None:
        raise GrammarError(f"structural_tag: structures[{index}].begin begins with none of the triggers")
    return StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=end)

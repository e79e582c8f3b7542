"""Translation of the grammars that clients write to llguidance's language, with errors that name the place."""

from __future__ import annotations

import json

from llguidance import LLMatcher

from pagewire.services.executor.grammar import gbnf
from pagewire.services.executor.grammar.errors import MAX_ERROR_LENGTH, GrammarError
from pagewire.services.executor.grammar.marks import Marks
from pagewire.services.executor.grammar.schema.engine_errors import sentence
from pagewire.services.executor.grammar.schema.errors import SchemaError
from pagewire.services.executor.grammar.schema.exact_json import parse
from pagewire.services.executor.grammar.schema.options import WHITESPACE, Options
from pagewire.services.executor.grammar.schema.texts import whitespace as whitespace_of
from pagewire.services.executor.grammar.schema.writing import to_lark
from pagewire.services.executor.grammar.structural_tag import from_structural_tag
from pagewire.v1.common_pb2 import Grammar


def to_llguidance(grammar: Grammar, marks: Marks, *, closes: bool) -> str:
    """Returns the grammar in llguidance's language.

    Args:
        marks: those of the vocabulary.
        closes: objects have no properties besides those that a schema declares, unless it or the grammar says so.

    Raises GrammarError for an error of form; errors of content appear when the grammar is compiled.
    """
    form = grammar.WhichOneof("form")
    if form == "json_schema":
        return LLMatcher.grammar_from_lark(_from_schema(grammar, _options(grammar, closes)))
    if form == "regex":
        return LLMatcher.grammar_from_regex(grammar.regex)
    if form == "choice":
        # One terminal: as alternatives of a rule, the parser would take no more than 2,000.
        texts = " | ".join(json.dumps(text) for text in grammar.choice.texts)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if form == "ebnf":
        return _from_ebnf(grammar.ebnf)
    if form == "structural_tag":
        return from_structural_tag(grammar.structural_tag, marks, _options(grammar, closes))
    raise GrammarError("grammar is empty; set one of json_schema, regex, choice, ebnf and structural_tag")


def describe_error(grammar: Grammar, error: str) -> str:
    """Returns the message for the client about an error of llguidance."""
    form = grammar.WhichOneof("form") or "grammar"
    is_own_text = form == "ebnf" and gbnf.is_lark(grammar.ebnf)
    return f"{form}: {sentence(error, form, is_own_text=is_own_text)[:MAX_ERROR_LENGTH]}"


def _options(grammar: Grammar, closes: bool) -> Options:
    if grammar.HasField("disable_additional_properties"):
        closes = grammar.disable_additional_properties
    whitespace: str | None = WHITESPACE
    if grammar.HasField("whitespace_pattern"):
        try:
            whitespace = whitespace_of(grammar.whitespace_pattern, "") or None
        except SchemaError as error:
            raise GrammarError(f"whitespace_pattern: {error.message}") from error
    elif grammar.disable_any_whitespace:
        whitespace = None
    return Options(whitespace, closes)


def _from_schema(grammar: Grammar, options: Options) -> str:
    try:
        schema = parse(grammar.json_schema, "json_schema")
    except SchemaError as error:
        raise GrammarError(error.message) from error
    if not isinstance(schema, dict | bool):
        raise GrammarError("json_schema must be an object, true or false")
    try:
        return to_lark(schema, options)
    except SchemaError as error:
        place = f" at #{error.place}" if error.place else ""
        raise GrammarError(f"json_schema{place}: {error.message[:MAX_ERROR_LENGTH]}") from error


def _from_ebnf(text: str) -> str:
    try:
        return LLMatcher.grammar_from_lark(gbnf.to_lark(text))
    except GrammarError as error:
        raise GrammarError(f"ebnf: {str(error)[:MAX_ERROR_LENGTH]}") from error

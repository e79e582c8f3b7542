"""The requested form of an output, whichever parameter sets it, as a Grammar for the executor."""

import json
from typing import Any

from pagewire.config.sampling_checks import MAX_GRAMMAR_BYTES
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.field_names import GRAMMAR, TOOLS
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.gateway.schema.sglang import OF_SGLANG
from pagewire.gateway.schema.structured import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredOutputs,
    TextFormat,
)
from pagewire.v1.common_pb2 import Grammar

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_ANY_OBJECT = '{"type": "object"}'


def grammar_of(body: GenerationParameters) -> Grammar | None:
    """Returns the grammar of the output; None if it is free. Raises ApiError 400 if several parameters set a form."""
    given: dict[str, Grammar] = {}
    if body.response_format is not None and not isinstance(body.response_format, TextFormat):
        given["response_format"] = _from_response_format(body.response_format)
    if body.structured_outputs is not None:
        given["structured_outputs"] = _from_structured_outputs(body.structured_outputs)
    for name in _GUIDED:
        if (value := getattr(body, name)) is not None:
            given[name] = _from_guided(name.removeprefix("guided_"), value)
    if len(given) > 1:
        *others, param = given
        raise ApiError(400, f"{param} cannot be combined with {' and '.join(others)}; give one of them", param=param)
    for param, grammar in given.items():
        if (size := grammar.ByteSize()) > MAX_GRAMMAR_BYTES:
            raise ApiError(400, f"{param} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are possible", param=param)
    return next(iter(given.values()), None)


def names_of(body: GenerationParameters) -> dict[str, str]:
    """Returns the body's names for the grammar (the parameter that sets the form, or `tools`) and for parameters that
    have SGLang's names."""
    names = {ours: theirs for theirs, ours in OF_SGLANG.items() if getattr(body, theirs) is not None}
    forms = [name for name in ("response_format", "structured_outputs", *_GUIDED) if getattr(body, name) is not None]
    if forms and not isinstance(getattr(body, forms[0]), TextFormat):
        return {**names, GRAMMAR: names.get(forms[0], forms[0])}
    return {**names, GRAMMAR: TOOLS}


def _from_response_format(value: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat) -> Grammar:
    if isinstance(value, JsonObjectFormat):
        schema = _ANY_OBJECT if value.content is None else _as_json(value.content, "response_format")
        return Grammar(json_schema=schema)
    if isinstance(value, JsonSchemaFormat):
        closed = True if value.json_schema.strict else None
        text = _as_json(value.json_schema.content, "response_format")
        return Grammar(json_schema=text, disable_additional_properties=closed)
    if value.format is not None:
        tag = {"type": "structural_tag", "format": value.format}
        return Grammar(structural_tag=_as_json(tag, "response_format"))
    structures = [{"begin": s.begin, "schema": s.content, "end": s.end} for s in value.structures or ()]
    return Grammar(structural_tag=_as_json({"triggers": value.triggers, "structures": structures}, "response_format"))


def _from_structured_outputs(value: StructuredOutputs) -> Grammar:
    forms = {
        "json": value.schema_,
        "regex": value.regex,
        "choice": value.choice,
        "grammar": value.grammar,
        "structural_tag": value.structural_tag,
        "json_object": value.json_object or None,
    }
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) != 1:
        *others, last = forms
        message = f"structured_outputs must have exactly one of {', '.join(others)} and {last}; it has"
        raise ApiError(400, f"{message} {' and '.join(given) or 'none of them'}", param="structured_outputs")
    ((name, form),) = given.items()
    grammar = Grammar(json_schema=_ANY_OBJECT) if name == "json_object" else _from_guided(name, form)
    if value.whitespace_pattern is not None:
        grammar.whitespace_pattern = value.whitespace_pattern
    grammar.disable_any_whitespace = bool(value.disable_any_whitespace)
    if value.disable_additional_properties is not None:
        grammar.disable_additional_properties = value.disable_additional_properties
    return grammar


def _from_guided(name: str, form: Any) -> Grammar:
    if name == "json":
        return Grammar(json_schema=form if isinstance(form, str) else _as_json(form, name))
    if name == "choice":
        return Grammar(choice=Grammar.Choice(texts=form))
    if name == "grammar":
        return Grammar(ebnf=form)
    return Grammar(**{name: form})


def _as_json(value: Any, param: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ApiError(400, "the schema is nested too deeply", param=param) from None

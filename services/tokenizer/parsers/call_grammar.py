"""The grammar of outputs with tool calls, if a call is forced or arguments must follow schemas."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.parsers.registry import OutputParsers
from pagewire.services.tokenizer.parsers.shared.formats import (
    WHITESPACE,
    CallableTool,
    Format,
    FormatError,
    listed,
    one_of,
    tag,
    text_of,
)
from pagewire.services.tokenizer.templates.chat_messages import json_object, json_text
from pagewire.v1.common_pb2 import Grammar
from pagewire.v1.inference_pb2 import GenerateRequest, OutputParsing, Tool

_ANY_ARGUMENTS: Mapping[str, Any] = {"type": "object"}


def grammar_with_calls(request: GenerateRequest, given: Grammar | None, parsers: OutputParsers) -> Grammar | None:
    """Returns the grammar of an output, or of the part after its reasoning; None if it is free. given: the client's.

    Raises RpcError (INVALID_ARGUMENT).
    """
    parsing, reader = request.output_parsing, parsers.call_reader
    if (kind := parsing.WhichOneof("forced")) is not None:
        return _forced(parsing, tools_of(request), kind, only_one=parsers.makes_one_call(parsing))
    if not parsing.tool_calls or reader is None:
        return given
    tools = tools_of(request)
    if not tools or (given is None and not any(tool.strict for tool in tools)):
        return given
    answer = None if given is None else _as_format(given)
    if given is not None and answer is None:
        return given
    if reader.format_has_reasoning and request.HasField("thinking_token_budget"):
        raise invalid(
            "thinking_token_budget cannot be combined with strict tools, or with tools and a grammar: the grammar of "
            "this model's calls includes its reasoning; leave one of them out"
        )
    callable_tools = [CallableTool(tool.name, _schema(tool) if tool.strict else _ANY_ARGUMENTS) for tool in tools]
    try:
        format = reader.output_format(
            callable_tools,
            only_one=parsers.makes_one_call(parsing),
            answer=answer,
            excludes=parsers.reasoning_marks if parsing.reasoning else (),
        )
    except FormatError as error:
        raise invalid(str(error)) from error
    return _structural_tag(format)


def tools_of(request: GenerateRequest) -> Sequence[Tool]:
    """Returns the tools that may be called."""
    return request.output_parsing.tools or request.chat.tools


def _schema(tool: Tool) -> dict[str, Any]:
    """Returns the schema of a tool's arguments; a tool without one takes none."""
    if not tool.parameters_json:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object"} | json_object(
        tool.parameters_json, f"the schema of the parameters of {tool.name!r}", "chat.tools"
    )
    own = schema.get("x-guidance")
    if tool.strict and isinstance(own, dict | None):
        schema["x-guidance"] = {"disable_additional_properties": True, "whitespace_pattern": WHITESPACE} | (own or {})
    return schema


def _as_format(grammar: Grammar) -> Format | None:
    """Returns a format; None for structural tags, which describe the calls themselves."""
    match grammar.WhichOneof("form"):
        case "json_schema":
            return _json_format(grammar)
        case "regex":
            return {"type": "regex", "pattern": grammar.regex}
        case "choice":
            return one_of(*map(text_of, grammar.choice.texts))
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.ebnf}
    return None


def _json_format(grammar: Grammar) -> Format | None:
    try:
        schema = json.loads(grammar.json_schema)
    except (ValueError, RecursionError):
        return None  # the executor reports the error
    if isinstance(schema, dict):
        options: dict[str, Any] = {}
        if grammar.HasField("whitespace_pattern"):
            options = {"whitespace_pattern": grammar.whitespace_pattern}
        elif grammar.disable_any_whitespace:
            options = {"whitespace_flexible": False, "whitespace_pattern": None}
        if grammar.HasField("disable_additional_properties"):
            options["disable_additional_properties"] = grammar.disable_additional_properties
        own = schema.get("x-guidance")
        schema["x-guidance"] = (own if isinstance(own, dict) else {}) | options
    return {"type": "json_schema", "json_schema": schema}


def _forced(parsing: OutputParsing, tools: Sequence[Tool], kind: str, *, only_one: bool) -> Grammar:
    """Returns a grammar of calls alone, in JSON, which does not depend on the model's marks."""
    if not tools:
        raise invalid(f"output_parsing.{kind} needs tools, in the chat or in output_parsing", f"output_parsing.{kind}")
    if kind == "required":
        calls = [
            tag(f'{{"name": {tool.json_name}, "arguments": ', tool.arguments, "}")
            for tool in (CallableTool(tool.name, _schema(tool)) for tool in tools)
        ]
        return _structural_tag(tag("[", listed(calls, ", ", only_one=only_one), "]"))
    for tool in tools:
        if tool.name == parsing.named:
            return Grammar(json_schema=json_text(_schema(tool)), whitespace_pattern=WHITESPACE)
    names = ", ".join(tool.name for tool in tools)
    raise invalid(
        f"output_parsing.named is {parsing.named!r}, which is not among the tools: {names}", "output_parsing.named"
    )


def _structural_tag(format: Format) -> Grammar:
    return Grammar(structural_tag=json_text({"type": "structural_tag", "format": format}))

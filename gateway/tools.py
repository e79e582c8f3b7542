"""Tools and reasoning of chats: from the body to the request, from outputs to the answer."""

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from pagewire.gateway.errors import ApiError
from pagewire.gateway.schema.requests import ChatCompletionRequest
from pagewire.gateway.schema.responses import FunctionCall, FunctionCallChunk, ToolCall, ToolCallChunk
from pagewire.gateway.schema.tools import NamedToolChoice, PastToolCall, Tool
from pagewire.v1 import common_pb2, inference_pb2


def wire_tools(tools: Iterable[Tool]) -> list[inference_pb2.Tool]:
    return [
        inference_pb2.Tool(
            name=tool.function.name,
            description=tool.function.description,
            parameters_json=None if tool.function.parameters is None else json.dumps(tool.function.parameters),
        )
        for tool in tools
    ]


def wire_call(call: PastToolCall) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)


def check_tools(body: ChatCompletionRequest) -> None:
    """Raises ApiError 400 for choices among tools that are not there, and for what cannot be promised yet."""
    choice, tools = body.tool_choice, body.tools or ()
    if choice not in (None, "none") and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and all(tool.function.name != choice.function.name for tool in tools):
        message = f"tool_choice names {choice.function.name!r}, which is not among the tools"
        raise ApiError(400, message, param="tool_choice.function.name")
    for index, tool in enumerate(tools if choice in (None, "auto") else ()):
        if tool.function.strict:
            message = (
                f"tool {tool.function.name!r} is strict: that arguments follow their schema can only be promised where "
                "a tool must be called (tool_choice 'required', or its name); leave strict out, and check the arguments"
            )
            raise ApiError(400, message, param=f"tools[{index}].function.strict", code="unsupported_parameter")


def output_parsing(body: ChatCompletionRequest) -> inference_pb2.OutputParsing:
    choice = body.tool_choice
    if choice == "required":
        return inference_pb2.OutputParsing(listed_calls=True)
    if isinstance(choice, NamedToolChoice):
        return inference_pb2.OutputParsing(arguments_of=choice.function.name)
    return inference_pb2.OutputParsing(
        # What a client has begun to write is the answer, not what comes before it.
        reasoning=not body.continue_final_message and body.separate_reasoning is not False,
        tool_calls=bool(body.tools) and choice != "none",
        first_tool_call_only=body.parallel_tool_calls is False,
    )


def call_grammar(body: ChatCompletionRequest) -> common_pb2.Grammar | None:
    """What the output must be for a tool to be called; None if none must be."""
    choice, tools = body.tool_choice, body.tools or ()
    schemas = {tool.function.name: {"type": "object"} | (tool.function.parameters or {}) for tool in tools}
    if isinstance(choice, NamedToolChoice):
        schema = schemas[choice.function.name]
    elif choice == "required":
        schema = _schema_of_calls(schemas, only_one=body.parallel_tool_calls is False)
    else:
        return None
    # Small models fill up lines with white space wherever they may.
    return common_pb2.Grammar(json_schema=json.dumps(schema), whitespace_pattern=" ?")


def _schema_of_calls(schemas: Mapping[str, dict[str, Any]], *, only_one: bool) -> dict[str, Any]:
    """Of a list of calls. What schemas define moves to its top, where references look for it.

    Raises ApiError 400 for two definitions of one name.
    """
    definitions: dict[str, dict[str, Any]] = {"$defs": {}, "definitions": {}}
    calls = []
    for name, schema in schemas.items():
        arguments = {key: value for key, value in schema.items() if key not in definitions}
        for key, defined in definitions.items():
            here = schema.get(key)
            for other, definition in here.items() if isinstance(here, dict) else ():
                if defined.setdefault(other, definition) != definition:
                    message = f"two tools define {key}/{other} differently; tool_choice 'required' needs one meaning"
                    raise ApiError(400, message, param="tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    whole: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if only_one:
        whole["maxItems"] = 1
    return whole | {key: defined for key, defined in definitions.items() if defined}


def call_chunks(deltas: Iterable[inference_pb2.ToolCallDelta]) -> list[ToolCallChunk]:
    """As OpenAI streams them: who is called, then arguments."""
    chunks = []
    for index, group in groupby(deltas, key=lambda delta: delta.index):
        of_call = list(group)
        first = of_call[0]
        if first.id:
            function = FunctionCallChunk(name=first.name, arguments="")
            chunks.append(ToolCallChunk(index=index, id=first.id, type="function", function=function))
        if arguments := "".join([delta.arguments for delta in of_call]):
            chunks.append(ToolCallChunk(index=index, function=FunctionCallChunk(arguments=arguments)))
    return chunks


def whole_calls(deltas: Iterable[inference_pb2.ToolCallDelta]) -> list[ToolCall]:
    calls = []
    for _, group in groupby(deltas, key=lambda delta: delta.index):
        of_call = list(group)
        arguments = "".join([delta.arguments for delta in of_call])
        calls.append(ToolCall(id=of_call[0].id, function=FunctionCall(name=of_call[0].name, arguments=arguments)))
    return calls

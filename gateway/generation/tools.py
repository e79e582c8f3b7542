"""Tools and reasoning of chats: from the body to the request, from outputs to the answer."""

import json
from collections.abc import Iterable
from itertools import groupby

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.schema.requests import ChatCompletionRequest
from pagewire.gateway.schema.responses import FunctionCall, FunctionCallChunk, ToolCall, ToolCallChunk
from pagewire.gateway.schema.tools import AllowedToolChoice, NamedToolChoice, PastToolCall, Tool
from pagewire.v1 import inference_pb2


def wire_tools(tools: Iterable[Tool]) -> list[inference_pb2.Tool]:
    return [
        inference_pb2.Tool(
            name=tool.function.name,
            description=tool.function.description,
            parameters_json=None if tool.function.parameters is None else json.dumps(tool.function.parameters),
            strict=bool(tool.function.strict),
        )
        for tool in tools
    ]


def wire_call(call: PastToolCall) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)


def choose_tools(body: ChatCompletionRequest) -> None:
    """Leaves the tools that are allowed, if the choice names some of them.

    Raises ApiError 400 for choices among tools that are not there.
    """
    choice, tools = body.tool_choice, body.tools or ()
    if choice not in (None, "none") and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and all(tool.function.name != choice.function.name for tool in tools):
        message = f"tool_choice names {choice.function.name!r}, which is not among the tools"
        raise ApiError(400, message, param="tool_choice.function.name")
    if isinstance(choice, AllowedToolChoice):
        names = {named.function.name for named in choice.allowed_tools.tools}
        if unknown := names - {tool.function.name for tool in tools}:
            message = f"tool_choice allows {', '.join(sorted(map(repr, unknown)))}, not among the tools"
            raise ApiError(400, message, param="tool_choice.allowed_tools.tools")
        body.tools = [tool for tool in tools if tool.function.name in names]
        body.tool_choice = choice.allowed_tools.mode


def output_parsing(body: ChatCompletionRequest) -> inference_pb2.OutputParsing:
    choice = body.tool_choice
    # What a client has begun to write is the answer, not what comes before it.
    parsing = inference_pb2.OutputParsing(
        reasoning=not body.continue_final_message and body.separate_reasoning is not False,
        first_tool_call_only=body.parallel_tool_calls is False,
    )
    if choice == "required":
        parsing.required = True
    elif isinstance(choice, NamedToolChoice):
        parsing.named = choice.function.name
    else:
        parsing.tool_calls = bool(body.tools) and choice != "none"
    return parsing


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

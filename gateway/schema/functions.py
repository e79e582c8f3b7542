"""`functions`, OpenAI's older form of `tools`: read as tools, and answered in the older form."""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import ConfigDict, Field

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.schema.field import required
from pagewire.gateway.schema.tools import (
    CalledFunction,
    Function,
    FunctionName,
    NamedToolChoice,
    PastArguments,
    PastToolCall,
    Tool,
    ToolChoice,
)

FunctionChoice = Annotated[Literal["none", "auto"] | FunctionName, Field(union_mode="left_to_right")]


class PastFunctionCall(BoundedModel):
    """A function call from an earlier answer."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str = required("tokenizer", "The function's name.", min_length=1)
    arguments: PastArguments = required("tokenizer", "The arguments as the model wrote them, even if cut off.")


class _Chat(Protocol):
    functions: list[Function] | None
    function_call: Literal["none", "auto"] | FunctionName | None
    tools: list[Tool] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool | None


class _Message(Protocol):
    role: str
    name: str | None
    function_call: PastFunctionCall | None
    tool_calls: list[PastToolCall] | None
    tool_call_id: str | None


def functions_to_tools(body: _Chat) -> None:
    """Writes the older form as the newer one.

    Raises ApiError 400 for both forms at once, and for a choice of a function that is not given.
    """
    choice = body.function_call
    if not body.functions:
        if choice not in (None, "none"):
            raise ApiError(400, "function_call needs functions", param="function_call")
        return
    if body.tools or body.tool_choice is not None:
        raise ApiError(400, "give either functions and function_call or tools and tool_choice", param="functions")
    if isinstance(choice, FunctionName):
        if all(function.name != choice.name for function in body.functions):
            message = f"function_call names {choice.name!r}, which is not among the functions"
            raise ApiError(400, message, param="function_call.name")
        body.tool_choice = NamedToolChoice(type="function", function=choice)
    else:
        body.tool_choice = choice
    body.tools = [Tool(type="function", function=function) for function in body.functions]
    body.parallel_tool_calls = False  # the answer can hold one call


def calls_to_tool_calls(messages: Sequence[_Message]) -> None:
    """A `function_call` becomes a tool call, and a `function` message the tool's answer to the last one of its name.

    Ids are nine letters and digits, which every template takes.
    """
    ids: dict[str, str] = {}
    for index, message in enumerate(messages):
        if (call := message.function_call) is not None:
            id = ids[call.name] = f"call{index:05}"
            function = CalledFunction(name=call.name, arguments=call.arguments)
            message.tool_calls = [PastToolCall(id=id, function=function)]
        elif message.role == "function" and message.name is not None:
            message.role, message.tool_call_id = "tool", ids.get(message.name)

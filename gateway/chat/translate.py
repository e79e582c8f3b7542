"""Bodies of /v1/chat/completions to GenerateRequests."""

from pagewire.gateway.chat.bodies import ChatCompletionRequest
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.prompt import fill_chat
from pagewire.gateway.generation.translate import choices_of, generate_request
from pagewire.gateway.schema.tools import AllowedToolChoice, NamedToolChoice, ToolChoice
from pagewire.v1 import inference_pb2


def chat_requests(body: ChatCompletionRequest) -> list[inference_pb2.GenerateRequest]:
    """Returns one request for each choice. Raises ApiError 400."""
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens"
            )
        max_tokens = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = generate_request(body, max_tokens, logprobs)
    choose_tools(body)
    fill_chat(request.chat, body.messages, body)
    if body.tool_choice == "none":
        del request.chat.tools[:]  # a model that does not see tools calls none
    set_output_parsing(request.output_parsing, body)
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    return choices_of(request, body)


def choose_tools(body: ChatCompletionRequest) -> None:
    """Removes the tools that the choice does not allow.

    Raises ApiError 400 for a choice of a tool that is not given.
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


def set_output_parsing(parsing: inference_pb2.OutputParsing, body: ChatCompletionRequest) -> None:
    """Sets what the tokenizer service looks for in the output: reasoning and calls."""
    # A beginning that the client has written belongs to the answer, not to the reasoning before it.
    parsing.reasoning = not body.continue_final_message and body.separate_reasoning is not False
    if body.parallel_tool_calls is not None:
        parsing.first_tool_call_only = not body.parallel_tool_calls
    force_call(parsing, body.tool_choice)
    if parsing.WhichOneof("forced") is None:
        parsing.tool_calls = bool(body.tools) and body.tool_choice != "none"


def force_call(parsing: inference_pb2.OutputParsing, choice: ToolChoice | None) -> None:
    """Sets which tools must be called, if any must be."""
    if choice == "required":
        parsing.required = True
    elif isinstance(choice, NamedToolChoice):
        parsing.named = choice.function.name

"""Bodies of the Responses API as GenerateRequests, through the chat with the same meaning."""

from collections.abc import Sequence
from typing import Any

from pagewire.gateway.chat.bodies import ChatCompletionRequest
from pagewire.gateway.chat.translate import chat_requests
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.field_names import GRAMMAR, TOOLS
from pagewire.gateway.responses.bodies.answers import (
    FunctionSettings,
    ModelResponse,
    ReasoningSettings,
    TextSettings,
)
from pagewire.gateway.responses.bodies.requests import (
    LOGPROBS,
    SHARED,
    AllowedResponseTools,
    CreateResponse,
    FunctionTool,
    NamedFunction,
)
from pagewire.gateway.schema.chat_messages import Message
from pagewire.gateway.schema.structured import JsonSchemaFormat, NamedSchema
from pagewire.gateway.schema.tools import Function, FunctionName, NamedToolChoice, Tool
from pagewire.v1.inference_pb2 import GenerateRequest


def generate_request(body: CreateResponse, messages: Sequence[Message]) -> GenerateRequest:
    """Raises ApiError 400 naming the parameter."""
    tools, tool_choice = _tools(body)
    wants_logprobs = LOGPROBS in (body.include or ())
    values = {name: getattr(body, name) for name in SHARED} | {
        "messages": list(messages),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": wants_logprobs,
        "top_logprobs": body.top_logprobs if wants_logprobs else None,
        "tools": tools,
        "tool_choice": tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    # Only given values, as every field takes time to validate; instances are not validated again.
    chat = ChatCompletionRequest.model_validate({name: value for name, value in values.items() if value is not None})
    (request,) = chat_requests(chat)
    return request


def names_of(body: CreateResponse) -> dict[str, str]:
    """Returns the names of this API for parameters of chats."""
    form = _response_format(body)
    guided = next((name for name in SHARED if name.startswith("guided_") and getattr(body, name) is not None), TOOLS)
    return {
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "logprobs": "top_logprobs",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.function.name": "tool_choice.name",
        GRAMMAR: guided if form is None or form.type == "text" else "text.format",
    }


def _tools(body: CreateResponse) -> tuple[list[Tool] | None, Any]:
    """Returns the tools that the model may call, and the choice of a tool."""
    tools: list[FunctionTool] | None = body.tools
    choice: Any = body.tool_choice
    if isinstance(choice, AllowedResponseTools):
        allowed = {tool.name for tool in choice.tools}
        if unknown := allowed - {tool.name for tool in tools or ()}:
            message = f"tool_choice allows {', '.join(sorted(map(repr, unknown)))}, not among the tools"
            raise ApiError(400, message, param="tool_choice.tools")
        tools, choice = [tool for tool in tools or () if tool.name in allowed], choice.mode
    elif isinstance(choice, NamedFunction):
        choice = NamedToolChoice(type="function", function=FunctionName(name=choice.name))
    if tools is None:
        return None, choice
    return [Tool(type="function", function=Function(**tool.model_dump(exclude={"type"}))) for tool in tools], choice


def _response_format(body: CreateResponse) -> Any:
    form = body.text.format if body.text else None
    if form is None or form.type != "json_schema":
        return form
    schema = NamedSchema.model_construct(name=form.name, content=form.content, strict=form.strict)
    return JsonSchemaFormat.model_construct(type="json_schema", json_schema=schema)


def new_response(body: CreateResponse, id: str, created_at: int, model: str) -> ModelResponse:
    """Returns a response without output."""
    return ModelResponse(
        id=id,
        created_at=created_at,
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningSettings(body.reasoning.effort) if body.reasoning else ReasoningSettings(),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=body.temperature,
        text=TextSettings(_as_json(body.text.format) if body.text and body.text.format else {"type": "text"}),
        tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else _as_json(body.tool_choice) or "auto",
        tools=[FunctionSettings(**tool.model_dump(exclude={"type"})) for tool in body.tools or ()],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
    )


def _as_json(value: Any) -> dict[str, Any]:
    """Returns the members that the client gave; {} for None."""
    if value is None:
        return {}
    given: dict[str, Any] = value.model_dump(by_alias=True, exclude_unset=True)
    return given

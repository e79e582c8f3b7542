"""Ollama's bodies as chats and completions, which have the same parameters by other names."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.chat.bodies import ChatCompletionRequest
from pagewire.gateway.chat.translate import chat_requests
from pagewire.gateway.completions.bodies import CompletionRequest
from pagewire.gateway.completions.translate import completion_requests
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.field_names import GRAMMAR, TOOLS
from pagewire.gateway.dialects.ollama.options import NAMES, OllamaOptions
from pagewire.gateway.dialects.ollama.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGenerating,
    OllamaTurn,
)
from pagewire.gateway.schema.chat_messages import ImagePart, ImageUrl, Message, Part, TextPart
from pagewire.gateway.schema.structured import JsonObjectFormat, JsonSchemaFormat, NamedSchema
from pagewire.gateway.schema.tools import CalledFunction, PastToolCall, Tool
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import GenerateRequest, Model


def names_of(body: OllamaGenerating) -> dict[str, str]:
    """Returns the names of this API for parameters of chats and completions."""
    tools = getattr(body, "tools", None)
    return {
        **NAMES,
        "logprobs": "top_logprobs",
        "response_format": "format",
        GRAMMAR: "format" if body.format or not tools else TOOLS,
    }


def check_abilities(body: OllamaGenerating, model: Model) -> None:
    """Raises ApiError 400, as Ollama does, if a request needs what the model was not trained for."""
    if model.kind != common_pb2.MODEL_KIND_UNSPECIFIED:
        raise ApiError(
            400, f"{body.model!r} does not generate text; see /api/embed, /rerank or /classify", param="model"
        )
    needs = {
        "tools": bool(getattr(body, "tools", None)) and not model.calls_tools,
        "thinking": bool(body.think) and body.think != "none" and not model.reasons,
        "insert": bool(getattr(body, "suffix", None)) and not model.fills_in_middle,
    }
    params = {"tools": "tools", "thinking": "think", "insert": "suffix"}
    for ability, is_missing in needs.items():
        if is_missing:
            raise ApiError(
                400, f"{body.model!r} does not support {ability}; remove {params[ability]}", param=params[ability]
            )


def chat_of(body: OllamaChatRequest, model: Model, turns: Sequence[OllamaTurn]) -> GenerateRequest:
    """Returns the request for the next turn after these. Raises ApiError 400."""
    tools = [Tool(type="function", function=tool.function) for tool in body.tools or ()]
    return _chat(body, model, messages_of(turns), tools)


def prompt_of(body: OllamaGenerateRequest, model: Model) -> GenerateRequest:
    """Returns the request that continues a prompt, or answers it. Raises ApiError 400."""
    if body.raw or body.suffix or not model.has_chat_template:
        return _text(body, model)
    turns = [OllamaTurn(role="system", content=body.system)] if body.system else []
    turns.append(OllamaTurn(role="user", content=body.prompt or "", images=body.images))
    return _chat(body, model, messages_of(turns), [])


def _chat(body: OllamaGenerating, model: Model, messages: Sequence[Message], tools: Sequence[Tool]) -> GenerateRequest:
    chat = ChatCompletionRequest.model_construct(
        **_common(body, model), messages=messages, tools=tools or None, **_thinking(body)
    )
    if body.logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs
    [request] = chat_requests(chat)
    request.clamp_max_tokens = True
    return request


def _text(body: OllamaGenerateRequest, model: Model) -> GenerateRequest:
    for name in ("system", "images", "context"):
        if getattr(body, name):
            raise ApiError(400, f"{name} needs a chat template, which {body.model} does not have", param=name)
    text = CompletionRequest.model_construct(
        **{"max_tokens": INT32_MAX, **_common(body, model)}, prompt=body.prompt or "", suffix=body.suffix or None
    )
    if body.logprobs:
        text.logprobs = body.top_logprobs or 0
    if body.truncate is not False and not body.suffix and model.max_model_len:
        most = (body.options and body.options.num_ctx) or INT32_MAX
        text.truncate_prompt_tokens = min(most, model.max_model_len - 1)  # the output has at least one
    [request] = completion_requests(text)
    request.clamp_max_tokens = True
    return request


def _common(body: OllamaGenerating, model: Model) -> dict[str, Any]:
    options = body.options or OllamaOptions()
    return {
        "model": model.id,
        "stream": body.stream is not False,
        "response_format": _format(body.format),
        **options.of_chat(),
    }


def _format(value: str | dict[str, Any] | None) -> JsonObjectFormat | JsonSchemaFormat | None:
    if isinstance(value, dict):
        return JsonSchemaFormat(type="json_schema", json_schema=NamedSchema(name="answer", schema=value))
    return JsonObjectFormat(type="json_object") if value else None


def _thinking(body: OllamaGenerating) -> dict[str, Any]:
    """Returns the parameters of chats that turn reasoning on or off."""
    if body.think is None:
        return {}
    if body.think is True:
        return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    return {"reasoning_effort": body.think or "none"}


def messages_of(turns: Sequence[OllamaTurn]) -> list[Message]:
    """Returns the messages of a conversation, in which calls have ids and results name the call that they answer."""
    messages, open_calls = [], list[PastToolCall]()
    for place, turn in enumerate(turns):
        calls = [
            PastToolCall(
                id=call.id or f"call{place:03}{index:02}", function=_called(call.function.name, call.function.arguments)
            )
            for index, call in enumerate(turn.tool_calls or ())
        ]
        open_calls += calls
        answers = _answered(turn, open_calls) if turn.role == "tool" else None
        messages.append(
            Message(
                role=turn.role,
                content=_content(turn),
                name=turn.tool_name or turn.name,
                reasoning=turn.thinking or None,
                tool_calls=calls or None,
                tool_call_id=answers,
            )
        )
    return messages


def _called(name: str, arguments: dict[str, Any] | None) -> CalledFunction:
    return CalledFunction(name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False))


def _answered(turn: OllamaTurn, open_calls: list[PastToolCall]) -> str | None:
    """Returns the id of the call that a tool's message answers, and removes the call: the first open one of its name,
    or the first one at all."""
    name = turn.tool_name or turn.name
    is_meant: Callable[[PastToolCall], bool] = (
        (lambda call: call.id == turn.tool_call_id)
        if turn.tool_call_id
        else (lambda call: name in (None, call.function.name))
    )
    found = next((call for call in open_calls if is_meant(call)), None)
    if found is None:
        return turn.tool_call_id
    open_calls.remove(found)
    return found.id


def _content(turn: OllamaTurn) -> str | list[Part]:
    if not turn.images:
        return turn.content or ""
    # The bytes of an image say what it is.
    urls = (f"data:;base64,{image}" for image in turn.images)
    parts: list[Part] = [ImagePart(type="image_url", image_url=ImageUrl(url=url)) for url in urls]
    return [*parts, TextPart(type="text", text=turn.content)] if turn.content else parts

"""Converts prompts and options of Python to messages of the public gRPC API."""

import base64
import json
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.sampling_options import ParameterOptions

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class SamplingOptions(ParameterOptions, total=False):
    """Fields of `SamplingParams` in common.proto, which describes them; None leaves one unset."""

    logit_bias: Mapping[int, float] | None
    stop_token_ids: Sequence[int]
    allowed_token_ids: Sequence[int]
    grammar: common_pb2.Grammar | None


class ChatOptions(TypedDict, total=False):
    """Options of chats.

    tools: in the form of OpenAI, {"type": "function", "function": {...}}. tool_choice: "auto", "none", "required" or
    the name of one of the tools. reasoning: separate it from the answer.
    """

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str
    reasoning: bool
    reasoning_effort: str | None
    thinking_token_budget: int | None
    documents: Sequence[Mapping[str, Any]]
    chat_template: str
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool | None
    continue_final_message: bool


class GenerateOptions(SamplingOptions, ChatOptions, total=False):
    """Fields of `GenerateRequest`, and those above. With n, responses of n outputs alternate."""

    model: str
    request_id: str
    stop: Sequence[str]
    bad_words: Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool | None
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    truncate_end: bool
    cache_salt: str
    suffix: str
    n: int
    best_of: int | None
    beam_search: inference_pb2.BeamSearch | None
    clamp_max_tokens: bool


_CHAT = frozenset(ChatOptions.__annotations__) - {"thinking_token_budget"}
_SAMPLING = frozenset(SamplingOptions.__annotations__)
_KNOWN = frozenset(GenerateOptions.__annotations__) | _CHAT | _SAMPLING | {"thinking_token_budget"}


def generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Returns the message.

    Raises TypeError for an unknown option, ValueError for one that does not fit the prompt or has a wrong form, OSError
    for an image that cannot be read.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - _KNOWN):
        raise TypeError(f"unknown option {', '.join(unknown)}; known are {', '.join(sorted(_KNOWN))}")
    sampling = _sampling_params({name: given.pop(name) for name in _SAMPLING & given.keys()})
    of_chat = {name: given.pop(name) for name in _CHAT & given.keys()}
    request = inference_pb2.GenerateRequest(sampling_params=sampling, **given)
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(prompt, of_chat))  # type: ignore[arg-type]
        _ask_to_parse(request, of_chat)
        return request
    else:
        request.token_ids.CopyFrom(inference_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]
    if of_chat:
        raise ValueError(f"{', '.join(sorted(of_chat))}: only chats have it; give messages as the prompt")
    return request


def input_text(text: str | Sequence[int] | Sequence[Message]) -> inference_pb2.InputText:
    """Returns the message for a text, token ids or a chat that yield a vector."""
    if isinstance(text, str):
        return inference_pb2.InputText(text=text)
    if text and isinstance(text[0], Mapping):
        return inference_pb2.InputText(chat=_chat(text, {}))  # type: ignore[arg-type]
    return inference_pb2.InputText(token_ids=inference_pb2.TokenIds(ids=text))  # type: ignore[arg-type]


def tokenize_request(
    prompt: str | Sequence[Message],
    model: str,
    add_special_tokens: bool | None,
    chat: Mapping[str, Any] = MappingProxyType({}),
) -> inference_pb2.TokenizeRequest:
    """Returns the message. chat: fields of `ChatOptions`, for messages."""
    request = inference_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        request.text = prompt
        request.add_special_tokens = add_special_tokens is not False
    else:
        request.chat.CopyFrom(_chat(prompt, chat))
    return request


def pair(text: str, text_pair: str) -> inference_pb2.InputText:
    return inference_pb2.InputText(text=text, text_pair=text_pair)


def _sampling_params(given: dict[str, Any]) -> common_pb2.SamplingParams:
    bias: Mapping[int, float] = given.pop("logit_bias", {})
    return common_pb2.SamplingParams(
        **given, logit_bias_ids=[int(token) for token in bias], logit_bias_values=bias.values()
    )


def _chat(messages: Sequence[Message], options: Mapping[str, Any]) -> inference_pb2.ChatPrompt:
    kwargs = options.get("chat_template_kwargs")
    return inference_pb2.ChatPrompt(
        messages=[_message(message) for message in messages],
        add_generation_prompt=options.get("add_generation_prompt"),
        continue_final_message=options.get("continue_final_message", False),
        chat_template=options.get("chat_template", ""),
        chat_template_kwargs_json=json.dumps(kwargs) if kwargs else "",
        tools=[_tool(tool) for tool in options.get("tools", ())],
        documents_json=[json.dumps(document) for document in options.get("documents", ())],
        reasoning_effort=options.get("reasoning_effort"),
    )


def _ask_to_parse(request: inference_pb2.GenerateRequest, options: Mapping[str, Any]) -> None:
    tools, choice = options.get("tools"), options.get("tool_choice", "auto")
    if not tools and choice not in ("auto", "none"):
        raise ValueError(f"tool_choice {choice!r} needs tools; give tools, too")
    if not tools and not options.get("reasoning"):
        return
    parsing = request.output_parsing
    parsing.reasoning = bool(options.get("reasoning"))
    if choice == "required":
        parsing.required = True
    elif choice not in ("auto", "none"):
        parsing.named = choice
    else:
        parsing.tool_calls = bool(tools) and choice == "auto"


def _tool(tool: Mapping[str, Any]) -> inference_pb2.Tool:
    function = tool.get("function", tool)
    if "name" not in function:
        raise ValueError(f'a tool must be {{"type": "function", "function": {{"name": ...}}}}, not {tool!r:.100}')
    parameters = function.get("parameters")
    return inference_pb2.Tool(
        name=function["name"],
        description=function.get("description"),
        parameters_json=None if parameters is None else json.dumps(parameters),
        strict=bool(function.get("strict")),
    )


def _message(message: Message) -> inference_pb2.ChatMessage:
    others = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
    wire = inference_pb2.ChatMessage(**others, tool_calls=[_call(call) for call in message.get("tool_calls") or ()])
    content = message.get("content")
    if isinstance(content, str):
        wire.content = content
    elif content is not None:
        wire.parts.extend(_part(part) for part in content)
    return wire


def _call(call: Mapping[str, Any]) -> inference_pb2.ToolCall:
    function = call.get("function", call)
    return inference_pb2.ToolCall(id=call.get("id", ""), name=function["name"], arguments=function["arguments"])


def _part(part: str | Path | Mapping[str, Any]) -> inference_pb2.ContentPart:
    if isinstance(part, str):
        return inference_pb2.ContentPart(text=part)
    if isinstance(part, Path):
        kind = mimetypes.guess_type(part.name)[0] or "image/png"
        data = base64.b64encode(part.read_bytes()).decode()
        return inference_pb2.ContentPart(image=inference_pb2.ImageSource(url=f"data:{kind};base64,{data}"))
    if "text" in part:
        return inference_pb2.ContentPart(text=part["text"])
    image = part.get("image_url", part.get("image"))
    url = image.get("url") if isinstance(image, Mapping) else image
    if isinstance(url, Path):
        return _part(url)
    if not isinstance(url, str):
        expected = 'a str, a Path, {"text": ...} or {"image": URL}'
        raise ValueError(f"a part of a message must be {expected}, not {part!r:.100}")
    return inference_pb2.ContentPart(image=inference_pb2.ImageSource(url=url))

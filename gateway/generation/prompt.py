"""Messages and tools of a body as the ChatPrompt that the tokenizer service renders."""

import json
from collections.abc import Sequence

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.schema.chat_messages import ChatPromptParameters, Message, TextPart
from pagewire.gateway.schema.tools import Function
from pagewire.v1 import inference_pb2


def fill_chat(prompt: inference_pb2.ChatPrompt, messages: Sequence[Message], body: ChatPromptParameters) -> None:
    """Writes a conversation and its parameters into a message of the wire.

    The message is the one that is sent, without a copy: a conversation with images may have megabytes.

    Raises ApiError 400.
    """
    for message in messages:
        _fill_message(prompt.messages.add(role=message.role), message)
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise ApiError(400, "continue_final_message excludes add_generation_prompt", param="continue_final_message")
        prompt.continue_final_message = True
        prompt.add_generation_prompt = False
    elif body.add_generation_prompt is not None:
        prompt.add_generation_prompt = body.add_generation_prompt
    prompt.chat_template = body.chat_template or ""
    kwargs = {"verbosity": body.verbosity} if body.verbosity is not None else {}
    if kwargs := kwargs | (body.chat_template_kwargs or {}):
        prompt.chat_template_kwargs_json = json.dumps(kwargs)
    for tool in body.tools or ():
        _add_tool(prompt, tool.function)
    prompt.documents_json.extend(map(json.dumps, body.documents or ()))
    if body.reasoning_effort is not None:
        prompt.reasoning_effort = body.reasoning_effort


def _fill_message(result: inference_pb2.ChatMessage, message: Message) -> None:
    if message.name is not None:
        result.name = message.name
    if isinstance(message.content, str):
        result.content = message.content
    else:
        for part in message.content or ():
            if isinstance(part, TextPart):
                result.parts.add(text=part.text)
            else:
                result.parts.add().image.url = part.image_url.url
    for call in message.tool_calls or ():
        result.tool_calls.add(id=call.id, name=call.function.name, arguments=call.function.arguments)
    if message.tool_call_id is not None:
        result.tool_call_id = message.tool_call_id
    if (reasoning := message.reasoning or message.reasoning_content) is not None:
        result.reasoning = reasoning


def _add_tool(prompt: inference_pb2.ChatPrompt, function: Function) -> None:
    prompt.tools.add(
        name=function.name,
        description=function.description,
        parameters_json=None if function.parameters is None else json.dumps(function.parameters),
        strict=bool(function.strict),
    )

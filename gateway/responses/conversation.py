"""Input items as the messages of a chat template."""

from collections.abc import Callable, Sequence
from typing import Any

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.responses.bodies.items import (
    FunctionCallInput,
    FunctionCallOutput,
    InputImagePart,
    ItemReference,
    MessageItem,
    ReasoningInput,
    RefusalPart,
)
from pagewire.gateway.schema.chat_messages import ImagePart, ImageUrl, Message, TextPart
from pagewire.gateway.schema.tools import CalledFunction, PastToolCall

AnyItem = MessageItem | FunctionCallInput | FunctionCallOutput | ReasoningInput | ItemReference


def messages_of(instructions: str | None, items: Sequence[AnyItem]) -> list[Message]:
    """Returns the messages of items without references.

    Consecutive reasoning, text and calls of the assistant are one message. Instructions and a system or developer
    message after them are one message, too: templates take a system message only at the beginning.

    Raises ApiError 400 for the output of an unknown call, and if there is no message.
    """
    messages: list[Message] = []
    thoughts: dict[int, list[str]] = {}  # of the message at this index
    if instructions:
        messages.append(Message(role="system", content=instructions))
    call_ids: set[str] = set()
    system = [instructions] if instructions else []  # texts of the first message
    for item in items:
        if isinstance(item, MessageItem) and item.role != "assistant":
            _add_message(messages, item, system)
        elif isinstance(item, FunctionCallOutput):
            if item.call_id not in call_ids:
                message = f"no earlier function_call has the call_id {item.call_id!r} of this function_call_output"
                raise ApiError(400, message, param="input")
            content = _content(item.output)
            messages.append(Message(role="tool", content=content, tool_call_id=item.call_id))
        elif isinstance(item, FunctionCallInput):
            call_ids.add(item.call_id)
            function = CalledFunction(name=item.name, arguments=item.arguments)
            calling = _assistant(messages, fits=lambda last: True)
            if calling.tool_calls is None:
                calling.tool_calls = []
            calling.tool_calls.append(PastToolCall(id=item.call_id, function=function))
        elif isinstance(item, ReasoningInput):
            if text := _reasoning(item):
                _assistant(messages, fits=_says_nothing)
                thoughts.setdefault(len(messages) - 1, []).append(text)
        elif isinstance(item, MessageItem):
            fresh = _assistant(messages, fits=_says_nothing)
            fresh.content = _content(item.content)
    if len(system) > 1:
        messages[0].content = "\n\n".join(system)
    for index, texts in thoughts.items():
        messages[index].reasoning = "".join(texts)
    for one in messages:
        if _says_nothing(one):
            one.content = ""  # reasoning only; some templates fail on null
    if not messages:
        raise ApiError(400, "the conversation is empty; give input", param="input")
    return messages


def _add_message(messages: list[Message], item: MessageItem, system: list[str]) -> None:
    """Adds a message, or its text to those of the first message, which are joined at the end."""
    role = "system" if item.role == "developer" else item.role
    content = _content(item.content)
    if role == "system" and isinstance(content, str) and (not messages or (len(messages) == 1 and system)):
        system.append(content)
        if messages:
            return
    messages.append(Message(role=role, content=content))


def _assistant(messages: list[Message], fits: Callable[[Message], bool]) -> Message:
    """Returns the assistant's last message, or a new one."""
    if not messages or messages[-1].role != "assistant" or not fits(messages[-1]):
        messages.append(Message(role="assistant"))
    return messages[-1]


def _says_nothing(message: Message) -> bool:
    return message.content is None and not message.tool_calls


def _reasoning(item: ReasoningInput) -> str:
    return "".join(part.text for part in item.content or item.summary or ())


def _content(content: str | Sequence[Any]) -> Any:
    """Returns a string if there is only text: some templates take nothing else."""
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImagePart) for part in content):
        return [_part(part) for part in content]
    return "\n".join(_text(part) for part in content)


def _part(part: Any) -> TextPart | ImagePart:
    if isinstance(part, InputImagePart):
        return ImagePart(type="image_url", image_url=ImageUrl(url=part.image_url))
    return TextPart(type="text", text=_text(part))


def _text(part: Any) -> str:
    text: str = part.refusal if isinstance(part, RefusalPart) else part.text
    return text

"""Converts messages, tools and documents to the plain data of transformers, which chat templates expect."""

import json
from typing import Any

from pagewire.errors import InvalidRequest
from pagewire.files.json_counts import json_fault
from pagewire.services.tokenizer.errors import invalid, invalid_request
from pagewire.services.tokenizer.templates.chat import Chat
from pagewire.v1 import inference_pb2

# Violations that an error message names; the details of the status have more.
MAX_NAMED = 5
# Roles with messages that may have no content: an assistant that only reasoned or called, a tool without output.
MAY_BE_EMPTY = ("assistant", "tool", "function")


class Arguments(dict[str, Any]):
    """Arguments of a call: an object as in transformers, which becomes text in templates that join it with text
    (DeepSeek)."""

    def __init__(self, values: dict[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return Arguments, (dict(self), self.text)

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


def to_chat(prompt: inference_pb2.ChatPrompt, parsing: inference_pb2.OutputParsing | None = None) -> Chat:
    """Returns a chat as templates read it. Its messages are checked before. parsing: of its answer.

    Raises RpcError (INVALID_ARGUMENT).
    """
    tools = [_tool(tool) for tool in prompt.tools]
    if prompt.HasField("add_generation_prompt"):
        add_generation_prompt = prompt.add_generation_prompt
    else:
        add_generation_prompt = not prompt.continue_final_message
    return Chat(
        messages=[_message(message) for message in prompt.messages],
        add_generation_prompt=add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        chat_template=prompt.chat_template,
        tools=tools,
        documents=[
            json_object(text, f"documents[{i}]", f"chat.documents_json[{i}]")
            for i, text in enumerate(prompt.documents_json)
        ],
        template_kwargs=_effort(prompt)
        | json_object(prompt.chat_template_kwargs_json, "chat_template_kwargs", "chat.chat_template_kwargs_json"),
        tools_in_words="" if parsing is None else _in_words(tools, parsing),
    )


def image_urls(prompt: inference_pb2.ChatPrompt) -> list[str]:
    """Returns the URLs of a chat's images, in their order."""
    return [part.image.url for message in prompt.messages for part in message.parts if part.HasField("image")]


def json_object(text: str, name: str, field: str) -> dict[str, Any]:
    """Returns the object in a JSON text; {} for "". Raises RpcError (INVALID_ARGUMENT)."""
    if not text:
        return {}
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is not text
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} is not valid JSON: {json_fault(error)}", field) from error
    if not isinstance(value, dict):
        raise invalid(f"{name} must be a JSON object, not {type(value).__name__}", field)
    return value


def check_chat(prompt: inference_pb2.ChatPrompt) -> None:
    """Raises RpcError (INVALID_ARGUMENT), naming every message that is wrong."""
    try:
        check_messages(prompt)
    except InvalidRequest as error:
        raise invalid_request(error) from error


def check_messages(prompt: inference_pb2.ChatPrompt) -> None:
    """Raises InvalidRequest, naming every message that is wrong."""
    violations = []
    for index, message in enumerate(prompt.messages):
        where = f"chat.messages[{index}]"
        if not message.role:
            violations.append(
                (f"{where}.role", f"{where}.role is empty; set it to user, assistant or system, for instance")
            )
        has_content = message.HasField("content") or message.parts
        if message.role not in MAY_BE_EMPTY and not has_content:
            field = f"{where}.content"
            violations.append((field, f"{field} of a {message.role!r} message is required; set content or parts"))
        for part_index, part in enumerate(message.parts):
            if part.WhichOneof("part") is None:
                field = f"{where}.parts[{part_index}]"
                violations.append((field, f"{field} is empty; set text or image"))
    if violations:
        what_is_wrong = "; ".join(description for _, description in violations[:MAX_NAMED])
        raise InvalidRequest(what_is_wrong, violations=violations)


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    """Keys without a value are absent, as templates expect it."""
    plain: dict[str, Any] = {"role": message.role}
    if message.HasField("content"):
        plain["content"] = message.content
    elif message.parts:
        plain["content"] = [
            {"type": "image"} if part.HasField("image") else {"type": "text", "text": part.text}
            for part in message.parts
        ]
    elif message.role in MAY_BE_EMPTY:
        # Templates join it with other text, or iterate over its parts: an empty text suits both.
        plain["content"] = ""
    if message.HasField("name"):
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    if message.HasField("tool_call_id"):
        plain["tool_call_id"] = message.tool_call_id
    if message.HasField("reasoning"):
        # Each of these names is read by some templates; GPT-OSS's refuses the last one together with content.
        plain["reasoning"] = plain["reasoning_content"] = message.reasoning
        if not plain.get("content"):
            plain["thinking"] = message.reasoning
    return plain


def _tool_call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": _arguments(call.arguments)},
    }


def _arguments(text: str) -> Arguments | str:
    """Returns the object, or the text if it is not JSON: a conversation must be able to continue after a wrong call."""
    values = object_of(text or "{}")
    return text if values is None else Arguments(values, text or "{}")


def object_of(text: str) -> dict[str, Any] | None:
    """Returns the object that a JSON text is; None if it is none."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None


def _tool(tool: inference_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = json_object(
            tool.parameters_json, f"the schema of the parameters of {tool.name!r}", "chat.tools"
        )
    return {"type": "function", "function": function}


def _in_words(tools: list[dict[str, Any]], parsing: inference_pb2.OutputParsing) -> str:
    """Returns what tells a model which tools it must call; "" if it need not call any."""
    functions = [tool["function"] for tool in tools]
    kind = parsing.WhichOneof("forced")
    if kind == "required" and functions:
        return f"You call functions. Functions: {json_text(functions)}"
    named = [function for function in functions if kind == "named" and function["name"] == parsing.named]
    return f"Call this function: {json_text(named[0])}" if named else ""


def json_text(value: Any) -> str:
    """Returns the JSON of tools or of their schemas. Raises RpcError (INVALID_ARGUMENT)."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise invalid("the schema of a tool is nested too deeply") from None


def _effort(prompt: inference_pb2.ChatPrompt) -> dict[str, Any]:
    if not prompt.HasField("reasoning_effort"):
        return {}
    thinks = prompt.reasoning_effort != "none"
    return {"reasoning_effort": prompt.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}

"""The messages of a chat, and how they become a prompt."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import wrong_member
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.functions import PastFunctionCall, calls_to_tool_calls
from pagewire.gateway.schema.parameters import Parameters
from pagewire.gateway.schema.tools import PastToolCall, Tool
from pagewire.gateway.schema.unsupported import REFUSED, UNSUPPORTED_IN_MESSAGE, refused_names


class TextPart(BoundedModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: str


class ImageUrl(BoundedModel):
    """The URL of an image. `detail` changes nothing: the model's own image processor decides."""

    model_config = ConfigDict(strict=True, extra="forbid")

    url: Annotated[str, StringConstraints(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(BoundedModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(BoundedModel):
    """One turn of the conversation."""

    unsupported = UNSUPPORTED_IN_MESSAGE
    model_config = ConfigDict(
        strict=True, extra="forbid", json_schema_extra={REFUSED: refused_names((), UNSUPPORTED_IN_MESSAGE)}
    )

    role: Annotated[str, StringConstraints(min_length=1)] = required(
        "tokenizer",
        "`system`, `developer` (`system` to templates that do not know it), `user`, `assistant`, `tool`, or "
        "another role that the chat template shows.",
    )
    content: str | list[Part] | None = field(
        "tokenizer",
        "Text, or parts. Required, except for messages of assistants and tools.",
        union_mode="left_to_right",
    )
    name: str | None = field("tokenizer", "The speaker's name, for templates that use it.")
    tool_calls: list[PastToolCall] | None = field("tokenizer", "The calls that the assistant made.")
    tool_call_id: str | None = field("tokenizer", "In a tool's message, the id of the call that it answers.")
    function_call: PastFunctionCall | None = field(
        "tokenizer", "Older form of `tool_calls`; a `function` message answers it."
    )
    reasoning: str | None = field("tokenizer", "The assistant's reasoning before its answer.")
    reasoning_content: str | None = field("tokenizer", "Older name of `reasoning`.")
    parsed: Any = field("gateway", "The content as the official client parsed it. Ignored.")

    @model_validator(mode="after")
    def _content_given(self) -> "Message":
        if self.content in (None, []) and self.role not in ("assistant", "tool", "function"):
            raise wrong_member("content", f"required in a message of role {self.role!r}")
        return self

    @model_validator(mode="after")
    def _functions_are_named(self) -> "Message":
        if self.role == "function" and not self.name:
            raise wrong_member("name", "required in a message of role 'function': the function that was called")
        if self.function_call is not None and self.tool_calls:
            raise wrong_member("function_call", "give either function_call or tool_calls")
        return self


def _only_supported_parts(messages: Any) -> Any:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        for k, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in ("text", "image_url"):
                raise ApiError(
                    400,
                    f"content parts of type {kind!r} are not supported yet, only 'text' and 'image_url'",
                    param=f"messages[{i}].content[{k}].type",
                    code="unsupported_parameter",
                )
    return messages


def _without_functions(messages: list[Message]) -> list[Message]:
    calls_to_tool_calls(messages)
    return messages


Messages = Annotated[
    list[Message],
    Field(min_length=1),
    BeforeValidator(_only_supported_parts),
    AfterValidator(_without_functions),
]


class ChatPromptParameters(Parameters):
    """The parameters that control how messages become a prompt."""

    tools: list[Tool] | None = field(
        "tokenizer",
        "The functions that the model may call; templates without tools ignore them unless one must be called.",
    )
    documents: list[dict[str, Any]] | None = field(
        "tokenizer", "Documents, for templates that use them; others ignore them."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = field(
        "tokenizer",
        "The template variable of this name; also sets `enable_thinking` and `thinking`, which are false for `none`.",
    )
    verbosity: Literal["low", "medium", "high"] | None = field("tokenizer", "The template variable of this name.")
    add_generation_prompt: bool | None = field(
        "tokenizer", "End the prompt with the beginning of the assistant's turn.", True
    )
    continue_final_message: bool | None = field(
        "tokenizer", "Continue the last message. Excludes `add_generation_prompt`.", False
    )
    add_special_tokens: bool | None = field(
        "tokenizer", "Add special tokens such as BOS to the output of the template.", False
    )
    chat_template: str | None = field(
        "tokenizer", "A Jinja template that replaces the model's own; only with `--trust-request-chat-template`."
    )
    chat_template_kwargs: dict[str, Any] | None = field("tokenizer", "Further variables of the chat template.")

"""The content blocks of messages from Anthropic's clients."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import wrong_member
from pagewire.gateway.schema.field import field, required

STRICT = ConfigDict(strict=True, extra="forbid")

Name = Annotated[str, StringConstraints(min_length=1)]
CACHE_CONTROL: Any = field("gateway", "Ignored: common beginnings of prompts are always cached.")
# A list that must be empty.
Nothing = Annotated[list[Any], Field(max_length=0)]


class TextBlockParam(BoundedModel):
    model_config = STRICT

    type: Literal["text"]
    text: str
    citations: Nothing | None = field("gateway", "Not supported: chat templates ignore them.")
    cache_control: dict[str, Any] | None = CACHE_CONTROL


class Base64Source(BoundedModel):
    model_config = STRICT

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str = required("tokenizer", "The image's bytes in base64.")


class UrlSource(BoundedModel):
    model_config = STRICT

    type: Literal["url"]
    url: Name = required("tokenizer", "A URL that the server may fetch (`--allowed-media-domains`).")


class ImageBlockParam(BoundedModel):
    model_config = STRICT

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: dict[str, Any] | None = CACHE_CONTROL


class ThinkingBlockParam(BoundedModel):
    """The assistant's reasoning before its answer."""

    model_config = STRICT

    type: Literal["thinking"]
    thinking: str = required("tokenizer", "Used by templates that show earlier reasoning.")
    signature: str | None = field("gateway", "Not checked.")


class RedactedThinkingBlockParam(BoundedModel):
    """Reasoning that only Anthropic can read; it is ignored."""

    model_config = STRICT

    type: Literal["redacted_thinking"]
    data: str


class DirectCaller(BoundedModel):
    model_config = STRICT

    type: Literal["direct"]


class ToolUseBlockParam(BoundedModel):
    """A call that the assistant made."""

    model_config = STRICT

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    caller: DirectCaller | None = field("gateway", "Only the model can call tools.")
    cache_control: dict[str, Any] | None = CACHE_CONTROL


ToolResultPart = Annotated[TextBlockParam | ImageBlockParam, Field(discriminator="type")]


class ToolResultBlockParam(BoundedModel):
    """The result of a call."""

    model_config = STRICT

    type: Literal["tool_result"]
    tool_use_id: Name = required("tokenizer", "The call's `id`.")
    content: str | list[ToolResultPart] | None = field(
        "tokenizer", "Text, or text and images.", union_mode="left_to_right"
    )
    is_error: bool | None = field("gateway", 'The model sees the content with "Error: " before it.', False)
    cache_control: dict[str, Any] | None = CACHE_CONTROL


Block = (
    TextBlockParam
    | ImageBlockParam
    | ThinkingBlockParam
    | RedactedThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
)


def blocks_of(content: str | Sequence[Block]) -> list[Block]:
    return [TextBlockParam(type="text", text=content)] if isinstance(content, str) else list(content)


_BLOCKS_OF: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class MessageParam(BoundedModel):
    """A part of a turn: neighbors of the same role are one turn."""

    model_config = STRICT

    role: Literal["user", "assistant", "system"]
    content: str | list[Annotated[Block, Field(discriminator="type")]] = required(
        "tokenizer", "Text, or blocks.", union_mode="left_to_right"
    )

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> "MessageParam":
        allowed = _BLOCKS_OF[self.role]
        for index, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if block.type not in allowed:
                words = f"a message of role {self.role!r} can have {', '.join(allowed)}, not {block.type}"
                raise wrong_member(f"content[{index}].type", words)
        if self.content == [] and self.role != "assistant":
            raise wrong_member("content", f"required in a message of role {self.role!r}")
        return self

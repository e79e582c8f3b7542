"""What messages are made of when Anthropic's clients send them: content blocks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

STRICT = ConfigDict(strict=True, extra="forbid")

Name = Annotated[str, StringConstraints(min_length=1)]
# Marks what to cache. Nothing has to be marked here: the prefix cache finds whatever prompts begin with in common.
CacheControl = dict[str, Any]
# A list in which nothing may be asked for.
Nothing = Annotated[list[Any], Field(max_length=0)]


class TextBlockParam(BaseModel):
    model_config = STRICT

    type: Literal["text"]
    text: str
    citations: Nothing | None = None
    cache_control: CacheControl | None = None


class Base64Source(BaseModel):
    model_config = STRICT

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(BaseModel):
    model_config = STRICT

    type: Literal["url"]
    url: Name


class ImageBlockParam(BaseModel):
    model_config = STRICT

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type")]
    cache_control: CacheControl | None = None


class ThinkingBlockParam(BaseModel):
    """What an assistant thought before it answered. Signatures are not checked."""

    model_config = STRICT

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlockParam(BaseModel):
    """Thoughts that only Anthropic can read: they are left out."""

    model_config = STRICT

    type: Literal["redacted_thinking"]
    data: str


class DirectCaller(BaseModel):
    model_config = STRICT

    type: Literal["direct"]


class ToolUseBlockParam(BaseModel):
    """A call that the assistant made."""

    model_config = STRICT

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    caller: DirectCaller | None = None
    cache_control: CacheControl | None = None


ToolResultPart = Annotated[TextBlockParam | ImageBlockParam, Field(discriminator="type")]


class ToolResultBlockParam(BaseModel):
    """What a call returned. A result that `is_error` is shown to the model with "Error: " before it."""

    model_config = STRICT

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Annotated[str | list[ToolResultPart] | None, Field(union_mode="left_to_right")] = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = (
    TextBlockParam
    | ImageBlockParam
    | ThinkingBlockParam
    | RedactedThinkingBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
)

_BLOCKS_OF: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


class MessageParam(BaseModel):
    """Part of a turn: neighbours of the same role are one."""

    model_config = STRICT

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Annotated[Block, Field(discriminator="type")]], Field(union_mode="left_to_right")]

    @property
    def blocks(self) -> list[Block]:
        if isinstance(self.content, str):
            return [TextBlockParam(type="text", text=self.content)]
        return self.content

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> "MessageParam":
        allowed = _BLOCKS_OF[self.role]
        for index, block in enumerate(self.content if isinstance(self.content, list) else ()):
            if block.type not in allowed:
                raise ValueError(f"content[{index}] is {block.type!r}; role {self.role!r} has {', '.join(allowed)}")
        if self.content == [] and self.role != "assistant":
            raise ValueError(f"content of a {self.role!r} message is required")
        return self

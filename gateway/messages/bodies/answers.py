"""The answers of `/v1/messages`, and Anthropic's forms of errors and of lists of models."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pagewire.gateway.core.body import Body

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
MessagesErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
]

# Clients that offer to store a conversation accept this code, and send the whole conversation each time.
NO_THREADS = "thread_unsupported_request"
# Anthropic signs thinking. Nothing is checked here, but clients drop thinking without a signature.
SIGNATURE = "unsigned"


# Errors.


class MessagesErrorDetails(Body):
    """The parameters that are not supported, for clients that can drop them."""

    error_code: str
    unsupported: list[str]


class MessagesErrorDetail(Body):
    type: MessagesErrorType
    message: str
    details: MessagesErrorDetails | UnsetType = UNSET


class MessagesError(Body, kw_only=True):
    """The shape of every error; in a stream that has begun, it is the last event, `error`."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str


# Content.


class TextBlock(Body, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Body, tag_field="type", tag="thinking"):
    """The model's thinking before its answer."""

    thinking: str
    signature: str


class ToolUseBlock(Body, tag_field="type", tag="tool_use"):
    """A call of a tool. `input` as the model wrote it; if the call was cut off, the part that can be read."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokensDetails(Body):
    thinking_tokens: int


class MessageUsage(Body):
    """Token counts. The prompt has `input_tokens`, and `cache_read_input_tokens` from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokensDetails


class AnsweredMessage(Body, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Body):
    input_tokens: int


# Events of a stream.


class MessageStart(Body, tag_field="type", tag="message_start"):
    """The message without content and stop reason; `usage` up to the first token."""

    message: AnsweredMessage


class Ping(Body, tag_field="type", tag="ping"):
    pass


class ContentBlockStart(Body, tag_field="type", tag="content_block_start"):
    """A block without its content."""

    index: int
    content_block: ContentBlock


class TextBlockDelta(Body, tag_field="type", tag="text_delta"):
    text: str


class ThinkingBlockDelta(Body, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Body, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(Body, tag_field="type", tag="input_json_delta"):
    """A piece of the JSON of a block's `input`."""

    partial_json: str


BlockDelta = TextBlockDelta | ThinkingBlockDelta | SignatureDelta | InputJsonDelta


class ContentBlockDelta(Body, tag_field="type", tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(Body, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(Body):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Body, tag_field="type", tag="message_delta"):
    """The end of the message, with the `usage` of the whole."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(Body, tag_field="type", tag="message_stop"):
    pass


EVENTS: tuple[type[Body], ...] = (
    MessageStart,
    Ping,
    ContentBlockStart,
    ContentBlockDelta,
    ContentBlockStop,
    MessageDelta,
    MessageStop,
    MessagesError,
)


# Models.


class ModelInfo(Body, kw_only=True):
    """A model in Anthropic's form; members that are unknown here are absent."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str  # RFC 3339
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(Body):
    """All models: there is one page."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None

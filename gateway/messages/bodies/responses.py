"""What `/v1/messages` answers, and Anthropic's forms of errors and lists of models."""

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

# Clients that offer a conversation for keeping take this code for an answer, and send the whole of it each time.
NO_THREADS = "thread_unsupported_request"
# Anthropic signs what its models thought. Nothing is checked here, but clients drop thoughts without a signature.
SIGNATURE = "unsigned"


# Errors.


class MessagesErrorDetails(Body):
    """For clients that can do without what is not supported."""

    error_code: str
    unsupported: list[str]


class MessagesErrorDetail(Body):
    type: MessagesErrorType
    message: str
    details: MessagesErrorDetails | UnsetType = UNSET


class MessagesError(Body, kw_only=True):
    """The shape of every error; in a stream that has begun it is the last event, `error`."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str


# Content.


class TextBlock(Body, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Body, tag_field="type", tag="thinking"):
    """What the model thought before it answered."""

    thinking: str
    signature: str


class ToolUseBlock(Body, tag_field="type", tag="tool_use"):
    """A call of a tool. `input` as the model wrote it; of a call that was cut off, as much as can be read."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "object"})]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokensDetails(Body):
    thinking_tokens: int


class MessageUsage(Body):
    """Prompt tokens are `input_tokens` and those found in the prefix cache, `cache_read_input_tokens`."""

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
    """The message without content and stop reason; `usage` up to its first token."""

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
    """Those of a block make up the JSON of its `input`."""

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
    """How the message ended; `usage` of all of it."""

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
    """What Anthropic's clients know of a model, as far as it is known here."""

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

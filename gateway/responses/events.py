"""The events of a streamed response, as OpenAI documents them, each with a number and a name."""

from typing import Literal

import msgspec

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.encoding import encode
from pagewire.gateway.responses.bodies.answers import ModelResponse, OutputItem, OutputText, ReasoningText
from pagewire.gateway.schema.answers import ChatLogprob

Lifecycle = Literal[
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.completed",
    "response.incomplete",
    "response.failed",
]


class ResponseEvent(Body):
    """The response as it is now."""

    type: Lifecycle
    response: ModelResponse
    sequence_number: int = 0


class ItemEvent(Body):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem
    sequence_number: int = 0


class PartEvent(Body):
    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText
    sequence_number: int = 0


class TextDelta(Body, kw_only=True):
    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str = ""
    logprobs: list[ChatLogprob] = msgspec.field(default_factory=list)
    sequence_number: int = 0


class TextDone(Body, kw_only=True):
    type: Literal["response.output_text.done"] = "response.output_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatLogprob]
    sequence_number: int = 0


class ReasoningDelta(Body, kw_only=True):
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str = ""
    sequence_number: int = 0


class ReasoningDone(Body, kw_only=True):
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    sequence_number: int = 0


class ArgumentsDelta(Body, kw_only=True):
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str = ""
    sequence_number: int = 0


class ArgumentsDone(Body, kw_only=True):
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int = 0


class ErrorEvent(Body, kw_only=True):
    """An error, which comes before `response.failed`."""

    type: Literal["error"] = "error"
    code: str | None
    message: str
    param: str | None
    sequence_number: int = 0


EVENTS: tuple[type[Body], ...] = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDelta,
    TextDone,
    ReasoningDelta,
    ReasoningDone,
    ArgumentsDelta,
    ArgumentsDone,
    ErrorEvent,
)
Event = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)


class EventStream:
    """Numbers events from 0, and writes those from number `first` on into `out`, if it is set."""

    def __init__(self, first: int = 0) -> None:
        self.out: list[bytes] | None = None
        self._first = first
        self._next = 0

    def add(self, event: Event) -> None:
        if self.out is not None and self._next >= self._first:
            event.sequence_number = self._next
            self.out += (b"event: ", event.type.encode(), b"\ndata: ", encode(event), b"\n\n")
        self._next += 1

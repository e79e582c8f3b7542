"""The answers of the Responses API: the response, the items of its output, and lists of input items."""

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from pagewire.gateway.core.body import Body
from pagewire.gateway.schema.answers import ChatLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Body, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = msgspec.field(default_factory=list)  # there are none
    logprobs: list[ChatLogprob] = msgspec.field(default_factory=list)


class ReasoningText(Body, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Body, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Body, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning of the model. `summary` is always empty."""

    id: str
    status: ItemStatus
    summary: list[str] = msgspec.field(default_factory=list)
    content: list[ReasoningText]


class FunctionCallItem(Body, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function. `arguments` as the model wrote them: a JSON object, unless it failed or was cut off."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = ReasoningItem | OutputMessage | FunctionCallItem


class InputTokensDetails(Body):
    """Prompt tokens from the prefix cache. Writes to the cache are not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Body):
    reasoning_tokens: int


class ResponseUsage(Body):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Body):
    code: str
    message: str


class IncompleteDetails(Body):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(Body):
    effort: str | None = None
    summary: str | None = None


class FunctionSettings(Body, kw_only=True):
    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class TextSettings(Body):
    format: dict[str, Any]
    verbosity: Literal["medium"] = "medium"


class ModelResponse(Body, kw_only=True):
    """The answer and the parameters of its request. null in temperature or top_p: the model's default."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    completed_at: int | None = None
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = msgspec.field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: None = None
    prompt: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float | None
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[FunctionSettings]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


class InputItemList(Body, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Body, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(Body, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


decode_response: Callable[[bytes], ModelResponse] = msgspec.json.Decoder(ModelResponse).decode

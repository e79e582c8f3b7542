"""The request and the answers of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.body import Body
from pagewire.gateway.generation.timing import RequestMetrics
from pagewire.gateway.schema.answers import ChatLogprobs, FinishReason, PromptEntries, StopReason, UsageInfo
from pagewire.gateway.schema.chat_messages import ChatPromptParameters, Messages
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.functions import FunctionChoice, functions_to_tools
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.gateway.schema.sampling import EAGER
from pagewire.gateway.schema.tools import PARALLEL, Function, ToolChoice


class ChatCompletionRequest(GenerationParameters, ChatPromptParameters):
    messages: Messages = required("tokenizer", "The conversation.")
    tool_choice: ToolChoice | None = field(
        "tokenizer",
        "`none` hides the tools from the model, `allowed_tools` shows a subset. With `required` or a name, a grammar "
        "forces a call, with any model.",
        "auto",
    )
    parallel_tool_calls: bool | None = field("tokenizer", PARALLEL)
    functions: list[Function] | None = field("tokenizer", "Older form of `tools`. The answer has one `function_call`.")
    function_call: FunctionChoice | None = field("tokenizer", "Older form of `tool_choice`.", "auto")
    include_reasoning: bool | None = field("gateway", "false: the answer has no `reasoning`.", True)
    separate_reasoning: bool | None = field(
        "tokenizer",
        "false: the reasoning stays in `content`, with its marks, and a form applies from the first token.",
        True,
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = field(
        "gateway", "All requests are served alike; the answer has `default`. See `priority`.", "auto"
    )
    store: bool | None = field("gateway", "Ignored: chats are not stored.", False)
    prediction: dict[str, Any] | None = field("gateway", "Ignored: a hint about the output.")
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "scheduler", "Newer name of `max_tokens`."
    )
    # Both become `logprobs` of the gRPC request: whether, and how many.
    logprobs: bool | None = field("executor", f"Log probabilities of the output's tokens. {EAGER}", False)
    top_logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor", "With `logprobs`: the number of most probable tokens, at most 20.", 0
    )

    @model_validator(mode="after")
    def _functions_are_tools(self) -> "ChatCompletionRequest":
        functions_to_tools(self)
        return self


# Answers.


ChatFinishReason = Literal[FinishReason, "function_call"]


class FunctionCall(Body):
    """A called function. `arguments` as the model wrote them: a JSON object, unless it failed or was cut off."""

    name: str
    arguments: str


class ToolCall(Body, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Body, kw_only=True):
    """The message of an answer. `reasoning_content` is the older name of `reasoning`. `content` is null if it is empty
    and another member is not."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionCall | UnsetType = UNSET


class ChatChoice(Body):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Body, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: UsageInfo
    metrics: RequestMetrics | UnsetType | None = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptEntries | None] | UnsetType | None = UNSET


class FunctionCallChunk(Body):
    """A part of a called function: the name in the first chunk, text of the arguments in the others."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallChunk(Body):
    """The addition of a chunk to the call with this index; the first one has id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallChunk | UnsetType = UNSET


class ChatDelta(Body):
    """The addition of a chunk to the message; empty in the last chunk of a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallChunk] | UnsetType = UNSET
    function_call: FunctionCallChunk | UnsetType = UNSET


class ChatChunkChoice(Body):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Body, kw_only=True):
    """One event of a streamed chat completion. With `include_usage` the last one has the usage and no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType | None = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET

"""What the server answers: every JSON object of the API, declared once.

The bytes are encoded from instances of these types (encoding.py), /openapi.json is generated from the types
(openapi.py). To add one, declare a subclass of `Body` and return it from an endpoint whose return annotation names it.

A field that may be UNSET is left out of the JSON where it is; all others are always present, None as null.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]
ChatFinishReason = Literal[FinishReason, "function_call"]
StopReason = int | str | None
"""The stop string or stop token that ended a generation (an extension of OpenAI's format)."""


# No value refers back to one that holds it, so the garbage collector need not follow them.
class Body(Struct, forbid_unknown_fields=True, gc=False):
    """A JSON object. Field order is the order of the members."""


# Errors.


class ErrorDetail(Body):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Body):
    """The shape of every error."""

    error: ErrorDetail


# What chat and text completions share.


class PromptTokensDetails(Body):
    cached_tokens: int


class CompletionTokensDetails(Body):
    """`reasoning_tokens`: of what is told as reasoning, without its marks."""

    reasoning_tokens: int


class UsageInfo(Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(Body):
    """`rank`: in the vocabulary, 1 = most probable."""

    logprob: float
    rank: int
    decoded_token: str


PromptEntries = dict[str, PromptLogprob]
"""By token id: a token of the prompt, and the alternatives."""


# Chat completions.


class TopLogprob(Body):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Body):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Body):
    content: list[ChatLogprob]
    refusal: None = None


class FunctionCall(Body):
    """`arguments` as the model wrote them: a JSON object, unless it failed or was cut off."""

    name: str
    arguments: str


class ToolCall(Body, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Body, kw_only=True):
    """`reasoning_content` is `reasoning` by its older name. `content` is null where there is only one of the others."""

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
    service_tier: Literal["default"] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptEntries | None] | UnsetType | None = UNSET


class FunctionCallChunk(Body):
    """The name in the first chunk of a call, text of the arguments in the others."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallChunk(Body):
    """What a chunk adds to the call with this index; id, type and name in the first one."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallChunk | UnsetType = UNSET


class ChatDelta(Body):
    """What a chunk adds to the message; empty in the last chunk of a choice."""

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
    """One event of a streamed chat completion. With `include_usage` the last one has no choices but the usage."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    choices: list[ChatChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET


# Text completions.


class CompletionLogprobs(Body):
    """OpenAI's legacy columns, one entry per token; top_logprobs holds the chosen token too, whatever its rank. Null
    for the first token of a prompt (`echo`)."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[PromptEntries | None] | UnsetType | None = UNSET


class Completion(Body, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: UsageInfo


class CompletionChunkChoice(Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Body, kw_only=True):
    """One event of a streamed completion. With `include_usage` the last one has no choices but the usage."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChunkChoice]
    usage: UsageInfo | UnsetType | None = UNSET


# Models, tokens, operation.


class Model(Body, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["pagewire"] = "pagewire"
    root: str
    parent: None = None
    max_model_len: int | None


class ModelList(Body, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeResponse(Body):
    """Of several texts each member but `max_model_len` is a list with one entry for each."""

    count: int | list[int]
    max_model_len: int
    tokens: list[int | list[int]]
    token_strs: list[str | list[str]] | None


class DetokenizeResponse(Body):
    """The text, as vLLM's and as SGLang's clients look for it."""

    prompt: str | list[str]
    text: str | list[str]


class Health(Body):
    status: Literal["ok", "unavailable"]
    reason: str | UnsetType = UNSET


class Version(Body):
    version: str

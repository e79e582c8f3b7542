"""What /docs says beyond the routes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

DESCRIPTION = """
OpenAI-compatible API of a Pagewire server, with vLLM's extensions.

With `--api-key`, every route but `/livez`, `/readyz` and `/health` needs the header `Authorization: Bearer KEY`.
A parameter that is not supported is refused by name, never ignored; `null` means unset.
`X-Request-Id` is taken from the request, or made, and returned.
"""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The shape of every error."""

    error: ErrorDetail


_MEANINGS = {
    400: "A parameter is wrong, unknown or not supported; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "No such route or model.",
    413: "The body is too large.",
    429: "Too many requests wait; try again after `Retry-After` seconds.",
    500: "The server failed.",
    503: "The engine is away; try again after `Retry-After` seconds.",
    504: "The engine took too long.",
}

ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    **{status: {"model": ErrorResponse, "description": meaning} for status, meaning in _MEANINGS.items()},
    "default": {"model": ErrorResponse, "description": "Any other error."},
}


class _Answer(BaseModel):
    """Documents what answer.py and its users write; nothing is validated when it is sent."""

    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Answer):
    cached_tokens: int


class UsageInfo(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length", "abort", "error"]
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[ChatLogprob]


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None


class Completion(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: None
    choices: list[CompletionChoice]
    usage: UsageInfo


def generation_responses(model: type[BaseModel], chunk: str) -> dict[int | str, dict[str, Any]]:
    """The answer, whole or as events; chunk names the object that each event carries."""
    events = {"schema": {"type": "string"}, "example": f'data: {{"object":"{chunk}",...}}\n\ndata: [DONE]\n\n'}
    return {200: {"model": model, "description": "The answer.", "content": {"text/event-stream": events}}}

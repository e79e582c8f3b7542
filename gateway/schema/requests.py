"""What clients send: OpenAI's request bodies with vLLM's extensions.

Every parameter may be null, which means unset; defaults are those of the services that apply them. Sampling parameters
are those of the table in `pagewire.sampling_params`.

Responses are msgspec's, requests pydantic's: a response is encoded for each token, while a request is read once and has
to be refused by name, with every violation of the parameter at fault. msgspec reports the first violation only and
cannot tell [1, 2] from ["a", "b"] in a union.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    create_model,
    model_validator,
)

from pagewire.gateway.errors import ApiError
from pagewire.gateway.schema.structured import Choices, ResponseFormat, Schema, StructuredOutputs
from pagewire.gateway.schema.tools import PastToolCall, Tool, ToolChoice
from pagewire.gateway.schema.unsupported import UNSUPPORTED, UNSUPPORTED_IN_MESSAGE, check_names
from pagewire.sampling_params import INT32_MAX, LOGIT_BIAS, MAX_CACHE_SALT, MAX_CHOICES, PARAMETERS, Parameter

# It returns in a header.
REQUEST_ID_PATTERN = r"^[\x21-\x7e]{1,128}$"
RequestId = Annotated[str, StringConstraints(pattern=REQUEST_ID_PATTERN)]

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIdList = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
# One or several, each as text or token ids.
Prompts = Annotated[
    str
    | TokenIdList
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIdList], Field(min_length=1, fail_fast=True)],
    Field(union_mode="left_to_right"),
]
# KV is shared only with requests of the same salt.
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CACHE_SALT)]
StopString = Annotated[str, StringConstraints(min_length=1)]


def _logit_bias(bias: dict[str, float]) -> dict[str, float]:
    for token_id, value in bias.items():
        if not token_id.isdecimal() or int(token_id) > INT32_MAX:
            raise ValueError(f"keys are token ids in decimal, not {token_id!r}")
        if value not in LOGIT_BIAS:
            raise ValueError(f"the bias of token {token_id} must be {LOGIT_BIAS}, not {value:g}")
    return bias


class Parameters(BaseModel):
    """A body whose values are taken as they are: no text for numbers, no numbers for booleans."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    @model_validator(mode="before")
    @classmethod
    def _only_known_names(cls, data: Any) -> Any:
        return check_names(data, cls.model_fields, cls.unsupported) if isinstance(data, dict) else data


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: str


class ImageUrl(BaseModel):
    """`detail` is a hint that OpenAI's models take; here the model's own image processor decides."""

    model_config = ConfigDict(strict=True, extra="forbid")

    url: Annotated[str, StringConstraints(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Annotated[str, StringConstraints(min_length=1)]
    content: Annotated[str | list[Part] | None, Field(union_mode="left_to_right")] = None
    name: str | None = None
    # An assistant's.
    tool_calls: list[PastToolCall] | None = None
    # A tool's: the call that it answers.
    tool_call_id: str | None = None
    # What an assistant thought before it answered; the second is the older name.
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _content_given(self) -> "Message":
        if self.content == [] or (self.content is None and self.role != "assistant"):
            raise ValueError(f"content of a {self.role!r} message is required")
        return self


def _only_supported_messages(messages: Any) -> Any:
    if not isinstance(messages, list):
        return messages
    return [_only_supported_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _only_supported_message(message: Any, where: str) -> Any:
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "image_url"):
            raise ApiError(
                400,
                f"content parts of type {kind!r} are not supported yet, only 'text' and 'image_url'",
                param=f"{where}.content[{i}].type",
                code="unsupported_parameter",
            )
    return check_names(message, Message.model_fields, UNSUPPORTED_IN_MESSAGE, f"{where}.")


Messages = Annotated[list[Message], Field(min_length=1), BeforeValidator(_only_supported_messages)]


class ChatPromptParameters(Parameters):
    """How messages become a prompt."""

    tools: list[Tool] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


def _field(parameter: Parameter) -> Any:
    """A field's type and its default with constraints, as pydantic takes them."""
    valid = parameter.valid
    return parameter.type | None, Field(None, ge=valid.minimum, le=valid.maximum, gt=valid.above)


SamplingParameters = create_model(
    "SamplingParameters", __base__=Parameters, **{parameter.name: _field(parameter) for parameter in PARAMETERS}
)


class GenerationParameters(SamplingParameters):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """What chat and completions share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, float], AfterValidator(_logit_bias)] | None = None
    stop: Annotated[StopString | list[StopString] | None, Field(union_mode="left_to_right")] = None
    stop_token_ids: list[TokenId] | None = None
    # Empty lists ask for nothing.
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[Annotated[str, StringConstraints(min_length=1)]] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    # What the output looks like; at most one of them says it.
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    # -1: to what the model takes. What is left is the end of the prompt, or with "right" its beginning.
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    # Labels that change nothing about the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationParameters":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        return self


class ChatCompletionRequest(GenerationParameters, ChatPromptParameters):
    messages: Messages
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    # Of the wire's logprobs: whether, and how many.
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None


class CompletionRequest(GenerationParameters):
    prompt: Prompts
    # Of so many, the n with the highest mean log probability are answered.
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    add_special_tokens: bool | None = None
    # Begin with the prompt.
    echo: bool | None = None

    @model_validator(mode="after")
    def _best_of_at_least_n(self) -> "CompletionRequest":
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise ApiError(400, f"best_of is {self.best_of}, less than n, which is {n}", param="best_of")
        if self.best_of is not None and self.best_of > n and self.stream:
            message = "the best outputs are known when all have ended; leave out best_of, or stream"
            raise ApiError(400, message, param="best_of")
        return self

    @model_validator(mode="after")
    def _echo_has_no_logprobs(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:  # clients would look for those of the prompt
            message = "echo together with logprobs is not supported yet; leave one of them out"
            raise ApiError(400, message, param="echo", code="unsupported_parameter")
        return self


class TokenizeRequest(ChatPromptParameters):
    """Either prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Parameters):
    model: str | None = None
    tokens: list[TokenId]

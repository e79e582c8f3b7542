"""What clients of the Responses API send: OpenAI's body with vLLM's extensions."""

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, create_model, model_validator

from pagewire.gateway.errors import ApiError
from pagewire.gateway.responses.items import Input
from pagewire.gateway.schema.requests import GenerationParameters, Parameters
from pagewire.gateway.schema.structured import JsonObjectFormat, TextFormat
from pagewire.gateway.schema.tools import Name
from pagewire.sampling_params import INT32_MAX

_STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
LOGPROBS = "message.output_text.logprobs"


class FunctionTool(BaseModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    model_config = _STRICT

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _only_functions(tools: Any) -> Any:
    """Raises ApiError 400 for tools that OpenAI's servers run."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            message = (
                f"tools of type {kind!r} are not supported: Pagewire runs no tools itself; describe the tool as one of"
                " type 'function', and send what it answers as a function_call_output"
            )
            raise ApiError(400, message, param=f"tools[{index}].type", code="unsupported_parameter")
    return tools


FunctionTools = Annotated[list[FunctionTool], BeforeValidator(_only_functions)]


class NamedFunction(BaseModel):
    """The one function that is to be called, or one of those that may be."""

    model_config = _STRICT

    type: Literal["function"]
    name: Name


class AllowedTools(BaseModel):
    """Some of the tools; the model sees no others."""

    model_config = _STRICT

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)]


FunctionChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedTools, Field(union_mode="left_to_right")
]


class NamedJsonSchema(BaseModel):
    """Whether strict or not, the output is what the schema describes."""

    model_config = _STRICT

    type: Literal["json_schema"]
    name: str
    description: str | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(BaseModel):
    """The form of the text. No model takes a verbosity but the default."""

    model_config = _STRICT

    format: Annotated[TextFormat | JsonObjectFormat | NamedJsonSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(BaseModel):
    """Reasoning is told as it is; nobody summarizes it, so "auto" means no summary."""

    model_config = _STRICT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class StreamConfig(BaseModel):
    """Deltas have no padding."""

    model_config = _STRICT

    include_obfuscation: Literal[False] | None = None


# Said otherwise here, or meaningless for one answer.
_NOT_HERE = {
    "n",
    "best_of",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
    "stream_options",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "truncate_prompt_tokens",
    "truncation_side",
    "return_token_ids",
}
_shared: dict[str, Any] = {
    name: (field.annotation, copy.copy(field))
    for name, field in GenerationParameters.model_fields.items()
    if name not in _NOT_HERE
}
SharedParameters = create_model("SharedParameters", __base__=Parameters, **_shared)
SHARED = tuple(SharedParameters.model_fields)

Label = Annotated[str, StringConstraints(max_length=64)]
Metadata = Annotated[dict[Label, Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)]
# What the response should say beside itself. Only the first is not there anyway: there are no other kinds of items,
# input images are told in any case, and so is reasoning, in plain text.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class CreateResponse(SharedParameters):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """The next turn of a conversation: that of previous_response_id, and the input."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "kv_transfer_params": (),
        "mm_processor_kwargs": (),
        "moderation": (),
        "prompt": (),
        "vllm_xargs": (),
    }

    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(min_length=1)] | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: StreamConfig | None = None
    tools: FunctionTools | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[Includable] | None = None
    # Alternatives of each token; with include.
    top_logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Metadata | None = None
    # These change nothing: built-in tools are those that max_tool_calls counts, and prefixes are cached anyway.
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _needs(self) -> "CreateResponse":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.background and self.store is False:
            raise ApiError(400, "background needs store: true; its response could not be retrieved", param="background")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise ApiError(400, f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
        return self

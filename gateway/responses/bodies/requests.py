"""What clients of the Responses API send: OpenAI's body with vLLM's extensions."""

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, create_model, model_validator

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.responses.bodies.items import Input
from pagewire.gateway.schema.field import Off, RequestId, field, required
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.gateway.schema.parameters import LABEL, Parameters
from pagewire.gateway.schema.sampling import EAGER
from pagewire.gateway.schema.sglang import SglangParameters
from pagewire.gateway.schema.structured import JsonObjectFormat, TextFormat
from pagewire.gateway.schema.tools import Name
from pagewire.gateway.schema.unsupported import Refused

_STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
LOGPROBS = "message.output_text.logprobs"


class FunctionTool(BaseModel):
    """A function that the model may call."""

    model_config = _STRICT

    type: Literal["function"]
    name: Name
    description: str | None = field("tokenizer", "What it does, for the model.")
    parameters: dict[str, Any] | None = field("tokenizer", "JSON schema of its arguments.")
    strict: bool | None = field("executor", "The arguments of every call follow the schema.", False)


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
    """Some of the tools."""

    model_config = _STRICT

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)] = required("gateway", "The model sees no others.")


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
    """How the text is to be."""

    model_config = _STRICT

    format: Annotated[TextFormat | JsonObjectFormat | NamedJsonSchema, Field(discriminator="type")] | None = field(
        "executor", "The form of the output, which is sampled to keep to it."
    )
    verbosity: Literal["medium"] | None = field("gateway", "No chat template knows another.", "medium")


class ReasoningConfig(BaseModel):
    """How the model thinks, where it does."""

    model_config = _STRICT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = field(
        "tokenizer", "The template variable `reasoning_effort`."
    )
    summary: Literal["auto"] | None = field(
        "gateway", "Changes nothing: reasoning is told as it is, and nobody summarizes it."
    )
    generate_summary: Literal["auto"] | None = field("gateway", "Older name of `summary`.")


class ResponseStreamOptions(BaseModel):
    model_config = _STRICT

    include_obfuscation: Off | None = field("gateway", "Padding against eavesdroppers is not offered.", False)


# Said otherwise here, or meaningless for one answer. SGLang's names are for chats and completions.
_NOT_HERE = {
    "n",
    "max_tokens",
    "logprobs",
    "stream_options",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
}
_shared: dict[str, Any] = {
    name: (info.annotation, copy.copy(info))
    for name, info in GenerationParameters.model_fields.items()
    if name not in _NOT_HERE and name not in SglangParameters.model_fields
}
SharedParameters = create_model("SharedParameters", __base__=Parameters, **_shared)
SHARED = tuple(SharedParameters.model_fields)

Label = Annotated[str, StringConstraints(max_length=64)]
Metadata = Annotated[dict[Label, Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)]
# All but the first change nothing: reasoning and input images are told in any case, and there are no other items.
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

_UNSUPPORTED: Mapping[str, Refused] = {
    "access_programs": Refused("there are none"),
    "background_options": Refused("background responses run as soon as there is room"),
    "context_management": Refused("conversations are not compacted; see truncation", ([],)),
    "conversation": Refused("conversations are not stored as such; see previous_response_id"),
    "image": Refused("images are read as the server's flags say"),
    "kv_transfer_params": Refused("KV is not transferred between servers"),
    "max_tokens": Refused("it is max_output_tokens here"),
    "mm_processor_kwargs": Refused("images are read as the server's flags say"),
    "moderation": Refused("there is no moderation model"),
    "n": Refused("a response is one answer", (1,)),
    "prompt": Refused("prompts are not stored; give instructions and input"),
    "prompt_logprobs": Refused("ask a chat"),
    "response_format": Refused("it is text.format here"),
    "return_token_ids": Refused("ask a chat"),
    "return_tokens_as_token_ids": Refused("ask a chat"),
    "vllm_xargs": Refused("there are no plug-ins"),
}
_CACHED = "Changes nothing: prefixes are cached anyway."


class CreateResponse(SharedParameters):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """The next turn of a conversation: that of `previous_response_id`, and the input."""

    unsupported: ClassVar[Mapping[str, Refused]] = _UNSUPPORTED

    input: Input | None = field("tokenizer", "A user's message, or items.", union_mode="left_to_right")
    instructions: str | None = field(
        "tokenizer", "A system message before everything. Not carried over by `previous_response_id`."
    )
    previous_response_id: Annotated[str, StringConstraints(min_length=1)] | None = field(
        "gateway", "A stored response; what was said up to it comes before the input."
    )
    store: bool | None = field("gateway", "Keep the response, to be retrieved and continued from.", True)
    background: bool | None = field("gateway", "Answer at once, and generate without a connection.", False)
    stream_options: ResponseStreamOptions | None = field("gateway", "Only with `stream`.")
    tools: FunctionTools | None = field(
        "tokenizer", "What the model may call; templates that know no tools leave them out."
    )
    tool_choice: FunctionChoice | None = field(
        "tokenizer",
        "`none` does not show the tools. `required` or a name: a grammar holds the output to calls, of any model.",
        "auto",
        union_mode="left_to_right",
    )
    parallel_tool_calls: bool | None = field("tokenizer", "false: all calls but the first are left out.", True)
    text: TextConfig | None = field("executor", "How the text is to be.")
    reasoning: ReasoningConfig | None = field("tokenizer", "How the model thinks.")
    include: list[Includable] | None = field(
        "gateway", f"`{LOGPROBS}`: log probabilities of the text's tokens. {EAGER} Others change nothing."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor", "With log probabilities: that many of the most probable tokens, at most 20.", 0
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "scheduler", "Longest output, reasoning included. Unset: what the model takes."
    )
    truncation: Literal["auto", "disabled"] | None = field(
        "gateway", "`auto`: what was said first is left out of a conversation that is too long.", "disabled"
    )
    chat_template_kwargs: dict[str, Any] | None = field("tokenizer", "Further variables of the chat template.")
    request_id: RequestId | None = field("gateway", "Takes precedence over `X-Request-Id`.")
    service_tier: Literal["auto", "default"] | None = field("gateway", "All requests are equal; see `priority`.")
    metadata: Metadata | None = field("gateway", LABEL)
    max_tool_calls: Annotated[int, Field(ge=1)] | None = field(
        "gateway", "Changes nothing: it counts calls of tools that the server runs, and there are none."
    )
    prompt_cache_retention: str | None = field("gateway", _CACHED)
    prompt_cache_options: dict[str, Any] | None = field("gateway", _CACHED)

    @model_validator(mode="after")
    def _needs(self) -> "CreateResponse":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.background and self.store is False:
            raise ApiError(400, "background needs store: true; its response could not be retrieved", param="background")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise ApiError(400, f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
        return self

"""The request of the Responses API: OpenAI's body with vLLM's extensions."""

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, create_model, model_validator

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.responses.bodies.items import Input
from pagewire.gateway.schema.field import Off, RequestId, field, required
from pagewire.gateway.schema.generation import GenerationParameters
from pagewire.gateway.schema.parameters import LABEL, Parameters
from pagewire.gateway.schema.sampling import EAGER
from pagewire.gateway.schema.sglang import SglangParameters
from pagewire.gateway.schema.structured import JsonObjectFormat, TextFormat
from pagewire.gateway.schema.tools import PARALLEL, Name

_STRICT = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
LOGPROBS = "message.output_text.logprobs"


class FunctionTool(BoundedModel):
    """A function that the model may call."""

    model_config = _STRICT

    type: Literal["function"]
    name: Name
    description: str | None = field("tokenizer", "What the function does, for the model.")
    parameters: dict[str, Any] | None = field("tokenizer", "A JSON schema of the arguments.")
    strict: bool | None = field("executor", "The arguments of every call follow the schema.", False)


def _only_functions(tools: Any) -> Any:
    """Raises ApiError 400 for tools that OpenAI's servers run."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            message = (
                f"tools of type {kind!r} are not supported, as the server runs no tools; describe it as a tool of type"
                " 'function', and send its result as a function_call_output"
            )
            raise ApiError(400, message, param=f"tools[{index}].type", code="unsupported_parameter")
    return tools


FunctionTools = Annotated[list[FunctionTool], BeforeValidator(_only_functions)]


class NamedFunction(BoundedModel):
    """The function that must be called, or one that may be called."""

    model_config = _STRICT

    type: Literal["function"]
    name: Name


class AllowedResponseTools(BoundedModel):
    """A subset of the tools."""

    model_config = _STRICT

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1)] = required("gateway", "The model sees only these.")


FunctionChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedFunction | AllowedResponseTools, Field(discriminator="type")],
    Field(union_mode="left_to_right"),
]


class NamedJsonSchema(BoundedModel):
    """A schema that the output follows, strict or not."""

    model_config = _STRICT

    type: Literal["json_schema"]
    name: str
    description: str | None = None
    content: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextConfig(BoundedModel):
    """The form of the text."""

    model_config = _STRICT

    format: Annotated[TextFormat | JsonObjectFormat | NamedJsonSchema, Field(discriminator="type")] | None = field(
        "executor", "The form of the output, which sampling enforces."
    )
    verbosity: Literal["medium"] | None = field("gateway", "Chat templates have no other.", "medium")


class ReasoningConfig(BoundedModel):
    """The reasoning of models that reason."""

    model_config = _STRICT

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = field(
        "tokenizer", "The template variable `reasoning_effort`."
    )
    summary: Literal["auto"] | None = field("gateway", "Ignored: the answer has the reasoning itself, not a summary.")
    generate_summary: Literal["auto"] | None = field("gateway", "Older name of `summary`.")


class ResponseStreamOptions(BoundedModel):
    model_config = _STRICT

    include_obfuscation: Off | None = field("gateway", "Padding against eavesdropping is not supported.", False)


# Parameters with another name here, or without a meaning for one answer. SGLang's names are for chats and completions.
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
# All but the first are ignored: reasoning and input images are always included, and there are no other items.
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
    "access_programs": Refused("the server has no access programs"),
    "background_options": Refused("background responses run as soon as there is room"),
    "context_management": Refused("the server does not compact conversations; see truncation", ([],)),
    "conversation": Refused("the server does not store conversations; see previous_response_id"),
    "image": Refused("the server's flags set how images are read"),
    "kv_transfer_params": Refused("KV is not transferred between servers"),
    "max_tokens": Refused("use max_output_tokens"),
    "mm_processor_kwargs": Refused("the server's flags set how images are read"),
    "moderation": Refused("the server has no moderation model"),
    "n": Refused("a response has one answer", (1,)),
    "prompt": Refused("the server does not store prompts; give instructions and input"),
    "prompt_logprobs": Refused("see /v1/chat/completions"),
    "response_format": Refused("use text.format"),
    "return_token_ids": Refused("see /v1/chat/completions"),
    "return_tokens_as_token_ids": Refused("see /v1/chat/completions"),
    "vllm_xargs": Refused("the server has no plug-ins"),
}
_CACHED = "Ignored: prefixes are always cached."


class CreateResponse(SharedParameters):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """A request for the next turn of a conversation: that of `previous_response_id`, then the input."""

    unsupported: ClassVar[Mapping[str, Refused]] = _UNSUPPORTED

    input: Input | None = field("tokenizer", "A message of the user, or items.", union_mode="left_to_right")
    instructions: str | None = field(
        "tokenizer", "A system message before all others. `previous_response_id` does not include it."
    )
    previous_response_id: Annotated[str, StringConstraints(min_length=1)] | None = field(
        "gateway", "A stored response. Its conversation comes before the input."
    )
    store: bool | None = field("gateway", "Store the response, so that it can be retrieved and continued.", True)
    background: bool | None = field("gateway", "Answer at once, and generate in the background.", False)
    stream_options: ResponseStreamOptions | None = field("gateway", "Only with `stream`.")
    tools: FunctionTools | None = field(
        "tokenizer",
        "The functions that the model may call; templates without tools ignore them unless one must be called.",
    )
    tool_choice: FunctionChoice | None = field(
        "tokenizer",
        "`none` hides the tools from the model. With `required` or a name, a grammar forces a call, with any model.",
        "auto",
        union_mode="left_to_right",
    )
    parallel_tool_calls: bool | None = field("tokenizer", PARALLEL)
    text: TextConfig | None = field("executor", "The form of the text.")
    reasoning: ReasoningConfig | None = field("tokenizer", "The reasoning of models that reason.")
    include: list[Includable] | None = field(
        "gateway", f"`{LOGPROBS}`: log probabilities of the text's tokens. {EAGER} Others are ignored."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = field(
        "executor", "With log probabilities: the number of most probable tokens, at most 20.", 0
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "scheduler", "Most tokens of the output, including reasoning. Unset: as many as the model allows."
    )
    truncation: Literal["auto", "disabled"] | None = field(
        "gateway", "`auto`: drop the beginning of a conversation that is too long.", "disabled"
    )
    chat_template_kwargs: dict[str, Any] | None = field("tokenizer", "Further variables of the chat template.")
    request_id: RequestId | None = field("gateway", "Takes precedence over `X-Request-Id`.")
    service_tier: Literal["auto", "default"] | None = field("gateway", "All requests are served alike; see `priority`.")
    metadata: Metadata | None = field("gateway", LABEL)
    max_tool_calls: Annotated[int, Field(ge=1)] | None = field("gateway", "Ignored: the server runs no tools.")
    prompt_cache_retention: str | None = field("gateway", _CACHED)
    prompt_cache_options: dict[str, Any] | None = field("gateway", _CACHED)

    @model_validator(mode="after")
    def _needs(self) -> "CreateResponse":
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.background and self.store is False:
            raise ApiError(
                400, "background needs store: true, so that the response can be retrieved", param="background"
            )
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise ApiError(400, f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
        return self

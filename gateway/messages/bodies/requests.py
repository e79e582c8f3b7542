"""The requests of `/v1/messages`: Anthropic's bodies, with vLLM's `cache_salt`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, create_model

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.messages.bodies.answers import NO_THREADS
from pagewire.gateway.messages.bodies.content import CACHE_CONTROL, STRICT, MessageParam, Name, Nothing, TextBlockParam
from pagewire.gateway.schema.field import Off, field, required
from pagewire.gateway.schema.parameters import LABEL, MODEL, CacheSalt, Parameters, StopStrings
from pagewire.gateway.schema.sampling import sampling_fields

_ELSEWHERE = "this server has one location and one speed"
_KEPT_THOUGHTS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # Claude Code's
_UNSUPPORTED: Mapping[str, Refused] = {
    "compaction": Refused("the server does not shorten conversations"),
    "container": Refused("the server runs no code"),
    "context_management": Refused("the server does not shorten conversations", ({"edits": []}, _KEPT_THOUGHTS)),
    "diagnostics": Refused("see the cached tokens in usage"),
    "fallbacks": Refused("the server serves one model", ([],)),
    "inference_geo": Refused(_ELSEWHERE),
    "kv_transfer_params": Refused("KV is not transferred between servers"),
    "mcp_servers": Refused("the server calls no MCP servers; clients do", ([],)),
    "speed": Refused(_ELSEWHERE, ("standard",)),
    "thread": Refused("the server does not store messages", code=NO_THREADS),
}
_SAMPLING = ("temperature", "top_p", "top_k")
_DISPLAY = "`omitted`: thinking blocks without their text."
_ONE_CALL = "Return only the first call."


class ToolParam(BoundedModel):
    """A tool that the client runs."""

    model_config = STRICT

    type: Literal["custom"] | None = None
    name: Name = required("tokenizer", "The name that the model uses.")
    description: str | None = field("tokenizer", "What the tool does, for the model.")
    input_schema: dict[str, Any] = required("tokenizer", "A JSON schema of the input.")
    strict: bool | None = field("executor", "The input of every call follows the schema.", False)
    cache_control: dict[str, Any] | None = CACHE_CONTROL
    eager_input_streaming: bool | None = field("gateway", "Ignored: input is always streamed.", True)
    defer_loading: Off | None = field("gateway", "Not supported: the model sees all tools.", False)
    allowed_callers: list[Literal["direct"]] | None = field("gateway", "Only the model can call tools.")
    input_examples: Nothing | None = field("gateway", "Not supported: chat templates ignore them.")


def _only_own_tools(tools: Any) -> Any:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = (
                f"tools[{index}]: {kind!r} works only with Anthropic's servers or models; describe your own tools with "
                "name, description and input_schema"
            )
            raise ApiError(400, message, param=f"tools[{index}].type", code="unsupported_parameter")
    return tools


class ToolChoiceAuto(BoundedModel):
    """A tool may be called."""

    model_config = STRICT

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = field("tokenizer", _ONE_CALL, False)


class ToolChoiceAny(BoundedModel):
    """A tool must be called: a grammar forces a call, with any model."""

    model_config = STRICT

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = field(
        "executor", "Exactly one call. Unset: true for models without a parser of calls."
    )


class ToolChoiceTool(BoundedModel):
    """The tool of this name must be called, once."""

    model_config = STRICT

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = field("executor", "Ignored: there is always one call.", True)


class ToolChoiceNone(BoundedModel):
    """The model does not see the tools."""

    model_config = STRICT

    type: Literal["none"]


class ThinkingEnabled(BoundedModel):
    """Turns thinking on in templates that can."""

    model_config = STRICT

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "executor", "Most tokens of thinking, which then ends. Needs a known `--reasoning-parser`."
    )
    display: Literal["summarized", "omitted"] | None = field("gateway", _DISPLAY)


class ThinkingAdaptive(BoundedModel):
    """Thinking without a budget: its length depends on the model and on `output_config.effort`."""

    model_config = STRICT

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = field("gateway", _DISPLAY)


class ThinkingDisabled(BoundedModel):
    """Turns thinking off in templates that can."""

    model_config = STRICT

    type: Literal["disabled"]


class JsonOutputFormat(BoundedModel):
    model_config = STRICT

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BoundedModel):
    model_config = STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = field(
        "tokenizer", "The template variable `reasoning_effort`, unless `thinking` is disabled."
    )
    format: JsonOutputFormat | None = field("executor", "The answer is JSON that follows the schema.")


class CountTokensRequest(Parameters):
    """The parts of a prompt."""

    unsupported: ClassVar[Mapping[str, Refused]] = _UNSUPPORTED

    model: str | None = field("tokenizer", MODEL)
    messages: Annotated[list[MessageParam], Field(min_length=1)] = required(
        "tokenizer", "The conversation. If its last message is the assistant's, the answer continues that text."
    )
    system: str | list[TextBlockParam] | None = field("tokenizer", "The system message.", union_mode="left_to_right")
    tools: Annotated[list[ToolParam] | None, BeforeValidator(_only_own_tools)] = field(
        "tokenizer",
        "The tools that the model may call; templates without tools ignore them unless one must be called.",
    )
    tool_choice: ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone | None = field(
        "tokenizer", "Whether tools may or must be called.", {"type": "auto"}, discriminator="type"
    )
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = field(
        "tokenizer",
        "Whether the model thinks first, for templates with that choice. Unset: the template's default.",
        discriminator="type",
    )
    output_config: OutputConfig | None = field("executor", "The form of the answer, and the effort of thinking.")
    output_format: JsonOutputFormat | None = field("executor", "Older name of `output_config.format`.")
    cache_control: dict[str, Any] | None = CACHE_CONTROL


_SampledRequest = create_model(
    "_SampledRequest", __base__=CountTokensRequest, **{name: sampling_fields()[name] for name in _SAMPLING}
)


class MessagesRequest(_SampledRequest):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """A request for the next turn of a conversation."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] = required(
        "scheduler",
        "Most tokens of the output. Where the prompt leaves less room, that is the limit: "
        "`model_context_window_exceeded`.",
    )
    stop_sequences: StopStrings | None = field("tokenizer", "Strings that end the output; they are not part of it.")
    stream: bool | None = field("gateway", "Answer with events.", False)
    cache_salt: CacheSalt | None = field(
        "scheduler", "The prefix cache is shared only with requests with the same salt."
    )
    metadata: dict[str, Any] | None = field("gateway", LABEL)
    service_tier: Literal["auto", "standard_only"] | None = field("gateway", LABEL)

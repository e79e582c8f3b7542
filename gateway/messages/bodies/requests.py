"""What clients send to `/v1/messages`: Anthropic's request bodies, with vLLM's `cache_salt`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, create_model

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.messages.bodies.content import CACHE_CONTROL, STRICT, MessageParam, Name, Nothing, TextBlockParam
from pagewire.gateway.messages.bodies.responses import NO_THREADS
from pagewire.gateway.schema.field import Off, field, required
from pagewire.gateway.schema.parameters import LABEL, MODEL, CacheSalt, Parameters, StopString
from pagewire.gateway.schema.sampling import sampling_fields
from pagewire.gateway.schema.unsupported import Refused

_ELSEWHERE = "this server has but one place and one speed"
_KEPT_THOUGHTS = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}  # Claude Code's
_UNSUPPORTED: Mapping[str, Refused] = {
    "compaction": Refused("conversations are not shortened"),
    "container": Refused("nothing is run"),
    "context_management": Refused("conversations are not shortened", ({"edits": []}, _KEPT_THOUGHTS)),
    "diagnostics": Refused("usage says what was cached"),
    "fallbacks": Refused("there is one model", ([],)),
    "inference_geo": Refused(_ELSEWHERE),
    "kv_transfer_params": Refused("KV is not transferred between servers"),
    "mcp_servers": Refused("nothing is run; clients call MCP servers", ([],)),
    "speed": Refused(_ELSEWHERE, ("standard",)),
    "thread": Refused("messages are not stored", code=NO_THREADS),
}
_SAMPLING = ("temperature", "top_p", "top_k")
_DISPLAY = "`omitted`: thinking blocks without their text."
_ONE_CALL = "Leave out all calls but the first."


class ToolParam(BaseModel):
    """A tool of the client's."""

    model_config = STRICT

    type: Literal["custom"] | None = None
    name: Name = required("tokenizer", "What the model calls it by.")
    description: str | None = field("tokenizer", "What it does, for the model.")
    input_schema: dict[str, Any] = required("tokenizer", "A JSON schema of its input.")
    strict: bool | None = field("executor", "Hold calls to the schema.", False)
    cache_control: dict[str, Any] | None = CACHE_CONTROL
    eager_input_streaming: bool | None = field("gateway", "Input is always streamed as it comes.", True)
    defer_loading: Off | None = field("gateway", "The model sees all tools.", False)
    allowed_callers: list[Literal["direct"]] | None = field("gateway", "Only the model calls tools.")
    input_examples: Nothing | None = field("gateway", "No template shows them.")


def _only_own_tools(tools: Any) -> Any:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = (
                f"tools[{index}]: {kind!r} is run by Anthropic's servers, or known to Anthropic's models only: give "
                "tools of your own, with name, description and input_schema"
            )
            raise ApiError(400, message, param=f"tools[{index}].type", code="unsupported_parameter")
    return tools


class ToolChoiceAuto(BaseModel):
    """A tool may be called."""

    model_config = STRICT

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = field("tokenizer", _ONE_CALL, False)


class ToolChoiceAny(BaseModel):
    """Some tool has to be called: a grammar holds the output to calls, of any model."""

    model_config = STRICT

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = field("executor", "One call.", False)


class ToolChoiceTool(BaseModel):
    """The tool of this name has to be called, once."""

    model_config = STRICT

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = field("executor", "One call, as ever.", True)


class ToolChoiceNone(BaseModel):
    """The model does not see the tools."""

    model_config = STRICT

    type: Literal["none"]


class ThinkingEnabled(BaseModel):
    """Templates that can turn thinking on do."""

    model_config = STRICT

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "executor", "Thinking is closed after so many tokens. Needs a known `--reasoning-parser`."
    )
    display: Literal["summarized", "omitted"] | None = field("gateway", _DISPLAY)


class ThinkingAdaptive(BaseModel):
    """As enabled without a budget: how much is up to the model, and to `output_config.effort`."""

    model_config = STRICT

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = field("gateway", _DISPLAY)


class ThinkingDisabled(BaseModel):
    """Templates that can turn thinking off do."""

    model_config = STRICT

    type: Literal["disabled"]


class JsonOutputFormat(BaseModel):
    model_config = STRICT

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = field(
        "tokenizer", "The template variable `reasoning_effort`, unless `thinking` is disabled."
    )
    format: JsonOutputFormat | None = field("executor", "The answer is JSON that follows the schema.")


class CountTokensRequest(Parameters):
    """What a prompt is made from."""

    unsupported: ClassVar[Mapping[str, Refused]] = _UNSUPPORTED

    model: str | None = field("tokenizer", MODEL)
    messages: Annotated[list[MessageParam], Field(min_length=1)] = required(
        "tokenizer", "The conversation. The answer goes on with the text of an assistant's last message."
    )
    system: str | list[TextBlockParam] | None = field("tokenizer", "The system message.", union_mode="left_to_right")
    tools: Annotated[list[ToolParam] | None, BeforeValidator(_only_own_tools)] = field(
        "tokenizer", "What the model may call; templates that know no tools leave them out."
    )
    tool_choice: ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone | None = field(
        "tokenizer", "Whether tools may or must be called.", {"type": "auto"}, discriminator="type"
    )
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = field(
        "tokenizer",
        "Whether to think first, for templates that ask. Unset: up to the template.",
        discriminator="type",
    )
    output_config: OutputConfig | None = field("executor", "The form of the answer, and how long to think.")
    output_format: JsonOutputFormat | None = field("executor", "Older name of `output_config.format`.")
    cache_control: dict[str, Any] | None = CACHE_CONTROL


_SampledRequest = create_model(
    "_SampledRequest", __base__=CountTokensRequest, **{name: sampling_fields()[name] for name in _SAMPLING}
)


class MessagesRequest(_SampledRequest):  # type: ignore[misc, valid-type]  # its fields are Any to mypy
    """Anthropic's, and `cache_salt`."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] = required("scheduler", "Longest output.")
    stop_sequences: list[StopString] | None = field("tokenizer", "Texts that end the output, which is without them.")
    stream: bool | None = field("gateway", "Answer with events.", False)
    cache_salt: CacheSalt | None = field("scheduler", "The prefix cache is shared only with requests of the same salt.")
    metadata: dict[str, Any] | None = field("gateway", LABEL)
    service_tier: Literal["auto", "standard_only"] | None = field("gateway", LABEL)

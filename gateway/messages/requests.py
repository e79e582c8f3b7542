"""What clients send to `/v1/messages`: Anthropic's request bodies, with vLLM's `cache_salt`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field

from pagewire.gateway.errors import ApiError
from pagewire.gateway.messages.content import STRICT, CacheControl, MessageParam, Name, Nothing, TextBlockParam
from pagewire.gateway.schema.requests import CacheSalt, Parameters, StopString
from pagewire.sampling_params import BY_NAME, INT32_MAX

_TOP_P = BY_NAME["top_p"].valid
_TOP_K = BY_NAME["top_k"].valid

# Name -> values that ask for nothing, as in schema/unsupported.py.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "betas": ([],),
    "compaction": (),
    "container": (),
    # Claude Code's: keep all thoughts.
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "diagnostics": (),
    "fallbacks": ([],),
    "inference_geo": (),
    "kv_transfer_params": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}


class ToolParam(BaseModel):
    """`input_schema` is a JSON schema. Arguments are streamed as they come, eagerly or not."""

    model_config = STRICT

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Nothing | None = None


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
    model_config = STRICT

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(BaseModel):
    """Some tool has to be called."""

    model_config = STRICT

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(BaseModel):
    """The one that has to be called."""

    model_config = STRICT

    type: Literal["tool"]
    name: Name
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(BaseModel):
    model_config = STRICT

    type: Literal["none"]


class ThinkingEnabled(BaseModel):
    model_config = STRICT

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    # "omitted": blocks without their text.
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(BaseModel):
    """How much is the model's to say, as it is where thinking is enabled without a budget."""

    model_config = STRICT

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(BaseModel):
    model_config = STRICT

    type: Literal["disabled"]


class JsonOutputFormat(BaseModel):
    """The answer is JSON that follows the schema."""

    model_config = STRICT

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    model_config = STRICT

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class CountTokensRequest(Parameters):
    """What makes up the prompt. Unset `thinking` is up to the chat template."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: Annotated[str | list[TextBlockParam] | None, Field(union_mode="left_to_right")] = None
    tools: Annotated[list[ToolParam] | None, BeforeValidator(_only_own_tools)] = None
    tool_choice: (
        Annotated[ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone, Field(discriminator="type")] | None
    ) = None
    thinking: (
        Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")] | None
    ) = None
    output_config: OutputConfig | None = None
    # The older name of output_config.format.
    output_format: JsonOutputFormat | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountTokensRequest):
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: list[StopString] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=_TOP_P.above, le=_TOP_P.maximum)] | None = None
    top_k: Annotated[int, Field(ge=_TOP_K.minimum, le=_TOP_K.maximum)] | None = None
    cache_salt: CacheSalt | None = None
    # Labels that change nothing about the answer.
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

"""Tools in requests: what the model may call, and what it has called."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pagewire.gateway.schema.field import field, required

_STRICT = ConfigDict(strict=True, extra="forbid")

Name = Annotated[str, StringConstraints(min_length=1)]


class Function(BaseModel):
    """`parameters` is a JSON schema. Arguments are held to it where the tool must be called, or if it is strict."""

    model_config = _STRICT

    name: Name = required("tokenizer", "What the model calls it by.")
    description: str | None = field("tokenizer", "What it does, for the model.")
    parameters: dict[str, Any] | None = field("tokenizer", "A JSON schema of its arguments. Unset: it takes none.")
    strict: bool | None = field("tokenizer", "Whenever it is called, the arguments follow the schema.", False)


class Tool(BaseModel):
    model_config = _STRICT

    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    model_config = _STRICT

    name: Name


class NamedToolChoice(BaseModel):
    """The one tool that is to be called."""

    model_config = _STRICT

    type: Literal["function"]
    function: FunctionName


class AllowedTools(BaseModel):
    model_config = _STRICT

    mode: Literal["auto", "required"] = required("gateway", "Whether one of them must be called.")
    tools: Annotated[list[NamedToolChoice], Field(min_length=1)] = required("gateway", "The model sees no others.")


class AllowedToolChoice(BaseModel):
    """Some of the tools."""

    model_config = _STRICT

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice, Field(union_mode="left_to_right")
]


class CalledFunction(BaseModel):
    """`arguments` as the model wrote them, a JSON object as a rule."""

    model_config = _STRICT

    name: Name = required("tokenizer", "The tool's name.")
    arguments: str = required("tokenizer", "What the model wrote.")
    parsed_arguments: Any = field("gateway", "What the official client has made of them. Ignored.")


class PastToolCall(BaseModel):
    """Of an earlier answer. `index` is what is left of one that was streamed."""

    model_config = _STRICT

    id: str = required("tokenizer", "Told again by the tool's answer.")
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = field("gateway", "Ignored.")

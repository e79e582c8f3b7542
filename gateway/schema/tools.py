"""Tools in requests: what the model may call, and what it has called."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

_STRICT = ConfigDict(strict=True, extra="forbid")

Name = Annotated[str, StringConstraints(min_length=1)]


class Function(BaseModel):
    """`parameters` is a JSON schema. Arguments are held to it where the tool must be called, or if it is strict."""

    model_config = _STRICT

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


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


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedToolChoice, Field(union_mode="left_to_right")]


class CalledFunction(BaseModel):
    """`arguments` as the model wrote them, a JSON object as a rule."""

    model_config = _STRICT

    name: Name
    arguments: str


class PastToolCall(BaseModel):
    """Of an earlier answer. `index` is what is left of one that was streamed."""

    model_config = _STRICT

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

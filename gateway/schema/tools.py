"""Tools in requests: the functions that the model may call, and its earlier calls."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints

from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.schema.field import field, required

_STRICT = ConfigDict(strict=True, extra="forbid")

PARALLEL = (
    "false: only the first call is returned. Unset: true, except where a call is required of a model without a "
    "parser of calls."
)

Name = Annotated[str, StringConstraints(min_length=1)]


class Function(BoundedModel):
    """A function that the model may call. Its arguments follow the schema if it must be called, or if it is strict."""

    model_config = _STRICT

    name: Name = required("tokenizer", "The name that the model uses.")
    description: str | None = field("tokenizer", "What the function does, for the model.")
    parameters: dict[str, Any] | None = field(
        "tokenizer", "A JSON schema of the arguments. Unset: the function takes none."
    )
    strict: bool | None = field("tokenizer", "The arguments of every call follow the schema.", False)


class Tool(BoundedModel):
    model_config = _STRICT

    type: Literal["function"]
    function: Function


class FunctionName(BoundedModel):
    model_config = _STRICT

    name: Name


class NamedToolChoice(BoundedModel):
    """The one tool that must be called."""

    model_config = _STRICT

    type: Literal["function"]
    function: FunctionName


class AllowedTools(BoundedModel):
    model_config = _STRICT

    mode: Literal["auto", "required"] = required("gateway", "Whether one of them must be called.")
    tools: Annotated[list[NamedToolChoice], Field(min_length=1)] = required("gateway", "The model sees only these.")


class AllowedToolChoice(BoundedModel):
    """A subset of the tools."""

    model_config = _STRICT

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedToolChoice | AllowedToolChoice, Field(discriminator="type")],
    Field(union_mode="left_to_right"),
]


def _as_text(arguments: Any) -> Any:
    """Some clients send the object instead of its JSON, or null if there are none."""
    if arguments is None:
        return "{}"
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


PastArguments = Annotated[str, BeforeValidator(_as_text)]


class CalledFunction(BoundedModel):
    """A called function. `arguments` as the model wrote them, usually a JSON object."""

    model_config = _STRICT

    name: Name = required("tokenizer", "The tool's name.")
    arguments: PastArguments = required("tokenizer", "The arguments as the model wrote them, even if cut off.")
    parsed_arguments: Any = field("gateway", "The arguments as the official client parsed them. Ignored.")


class PastToolCall(BoundedModel):
    """A tool call from an earlier answer. `index` is left over from streaming."""

    model_config = _STRICT

    id: str = required("tokenizer", "The tool's answer repeats it.")
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = field("gateway", "Ignored.")

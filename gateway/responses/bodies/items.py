"""Input items of the Responses API: messages, calls of functions, their outputs, reasoning, and references to items."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.schema.field import field, required
from pagewire.gateway.schema.tools import Name, PastArguments

_STRICT = ConfigDict(strict=True, extra="forbid")

Given = Annotated[str, StringConstraints(min_length=1)]
Status = Literal["in_progress", "completed", "incomplete"]

_ID = "An id for references; generated if unset."
_CACHED = "Ignored: prefixes are cached wherever they end."

# Members of OpenAI's items, which clients send back. A value other than the harmless ones is not supported.
_UNSUPPORTED: Mapping[str, Refused] = {
    "async": Refused("calls are always synchronous", (False,)),
    "async_": Refused("calls are always synchronous", (False,)),
    "caller": Refused("only the model can call functions", ({"type": "direct"},)),
    "created_by": Refused("the server has no accounts"),
    "encrypted_content": Refused("only the server that wrote it can read it"),
    "namespace": Refused("functions have no namespaces"),
}


class InputTextPart(BoundedModel):
    model_config = _STRICT

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = field("gateway", _CACHED)


class InputImagePart(BoundedModel):
    model_config = _STRICT

    type: Literal["input_image"]
    image_url: Given = required(
        "tokenizer", "An image as a `data:` URL, or a URL that `--allowed-media-domains` allows."
    )
    detail: Literal["auto", "low", "high", "original"] | None = field(
        "gateway", "Ignored: the model's own image processor decides."
    )
    prompt_cache_breakpoint: dict[str, Any] | None = field("gateway", _CACHED)


class OutputTextPart(BoundedModel):
    """Text from an earlier answer."""

    model_config = _STRICT

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = field("gateway", "Ignored.")
    logprobs: list[Any] | None = field("gateway", "Ignored.")


class RefusalPart(BoundedModel):
    model_config = _STRICT

    type: Literal["refusal"]
    refusal: str


InputPart = Annotated[InputTextPart | InputImagePart | OutputTextPart | RefusalPart, Field(discriminator="type")]
_PARTS = ("input_text", "input_image", "output_text", "refusal")
Content = Annotated[str | Annotated[list[InputPart], Field(min_length=1)], Field(union_mode="left_to_right")]


def _text_if_empty(content: Any) -> Any:
    return "" if content is None or content == [] else content


# Of a tool without output.
Output = Annotated[Content, BeforeValidator(_text_if_empty)]


class _Item(BoundedModel):
    model_config = _STRICT
    unsupported = _UNSUPPORTED


class MessageItem(_Item):
    """A message. `type` is optional."""

    type: Literal["message"] | None = None
    id: Given | None = field("gateway", _ID)
    role: Literal["user", "assistant", "system", "developer"] = required(
        "tokenizer", "`developer` is another name for `system`."
    )
    content: Content = required("tokenizer", "Text, or parts.")
    status: Status | None = field("gateway", "Ignored.")
    phase: str | None = field("gateway", "Ignored.")

    @model_validator(mode="before")
    @classmethod
    def _an_assistant_may_say_nothing(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "assistant" and "content" in data:
            return data | {"content": _text_if_empty(data["content"])}
        return data


class FunctionCallInput(_Item):
    """A call from an earlier answer."""

    type: Literal["function_call"]
    id: Given | None = field("gateway", _ID)
    call_id: Given = required("tokenizer", "The id that the output of the call repeats.")
    name: Name = required("tokenizer", "The name of the function.")
    arguments: PastArguments = required("tokenizer", "The arguments as the model wrote them, even if cut off.")
    status: Status | None = field("gateway", "Ignored.")


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    id: Given | None = field("gateway", _ID)
    call_id: Given = required("tokenizer", "The `call_id` of the call that it answers.")
    output: Output = required("tokenizer", "Text, or parts.")
    name: str | None = field("gateway", "Ignored.")
    status: Status | None = field("gateway", "Ignored.")


class SummaryText(BoundedModel):
    model_config = _STRICT

    type: Literal["summary_text"]
    text: str


class ReasoningTextPart(BoundedModel):
    model_config = _STRICT

    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(_Item):
    """The model's reasoning before an earlier answer."""

    type: Literal["reasoning"]
    id: Given | None = field("gateway", _ID)
    summary: list[SummaryText] | None = field("tokenizer", "Used if `content` is unset.")
    content: list[ReasoningTextPart] | None = field("tokenizer", "The reasoning.")
    status: Status | None = field("gateway", "Ignored.")


class ItemReference(_Item):
    """An item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: Given = required("gateway", "The id of an item of an input or an output.")


_ITEMS: Mapping[str, type[BoundedModel]] = {
    "message": MessageItem,
    "function_call": FunctionCallInput,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningInput,
    "item_reference": ItemReference,
}


def _kind(item: Any) -> str:
    """Returns the type of an item, which is JSON or parsed."""
    if isinstance(item, BoundedModel):
        return next(kind for kind, model in _ITEMS.items() if isinstance(item, model))
    kind = item.get("type") if isinstance(item, dict) else None
    if kind is None:
        return "item_reference" if isinstance(item, dict) and "id" in item and "role" not in item else "message"
    return str(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallInput, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]


def _only_supported(items: Any) -> Any:
    """Raises ApiError 400 for items, parts and members that only OpenAI's own services can read."""
    if not isinstance(items, list):
        return items
    return [_only_supported_item(item, f"input[{index}]") for index, item in enumerate(items)]


def _only_supported_item(item: Any, where: str) -> Any:
    if not isinstance(item, dict):
        return item
    if (kind := _kind(item)) not in _ITEMS:
        raise _unsupported_type(kind, f"{where}.type", "input items", _ITEMS)
    for name in ("content", "output"):
        parts = item.get(name)
        if isinstance(parts, list) and kind != "reasoning":
            item = item | {name: [_only_supported_part(part, f"{where}.{name}[{i}]") for i, part in enumerate(parts)]}
    return item


def _only_supported_part(part: Any, where: str) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if isinstance(kind, str) and kind not in _PARTS:
        raise _unsupported_type(kind, f"{where}.type", "content parts", _PARTS)
    if part.get("file_id") is not None:
        raise ApiError(400, "images cannot be files; give image_url", param=f"{where}.file_id")
    return {name: value for name, value in part.items() if name != "file_id"}


def _unsupported_type(kind: str, param: str, what: str, known: Any) -> ApiError:
    message = f"{what} of type {kind!r} are not supported, only {', '.join(map(repr, known))}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


Items = Annotated[list[Item], BeforeValidator(_only_supported)]
Input = Annotated[str | Items, Field(union_mode="left_to_right")]

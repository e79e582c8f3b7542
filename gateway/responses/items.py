"""Input items of the Responses API: messages, calls of functions, their outputs, reasoning, and references to items."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag

from pagewire.gateway.errors import ApiError
from pagewire.gateway.schema.tools import Name
from pagewire.gateway.schema.unsupported import check_names

_STRICT = ConfigDict(strict=True, extra="forbid")

Given = Annotated[str, StringConstraints(min_length=1)]
Status = Literal["in_progress", "completed", "incomplete"]

# What items of OpenAI's own have and clients send back with them; a value asks for something that is not there.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "async": (False,),
    "async_": (False,),
    "caller": ({"type": "direct"},),
    "created_by": (),
    "encrypted_content": (),
    "file_id": (),
    "namespace": (),
}


class InputTextPart(BaseModel):
    """`prompt_cache_breakpoint` has no effect: prefixes are cached wherever they end."""

    model_config = _STRICT

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImagePart(BaseModel):
    """`detail` is a hint that OpenAI's models take; here the model's own image processor decides."""

    model_config = _STRICT

    type: Literal["input_image"]
    image_url: Given
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class OutputTextPart(BaseModel):
    """Of an earlier answer."""

    model_config = _STRICT

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(BaseModel):
    model_config = _STRICT

    type: Literal["refusal"]
    refusal: str


InputPart = Annotated[InputTextPart | InputImagePart | OutputTextPart | RefusalPart, Field(discriminator="type")]
_PARTS = ("input_text", "input_image", "output_text", "refusal")
Content = Annotated[str | Annotated[list[InputPart], Field(min_length=1)], Field(union_mode="left_to_right")]


class MessageItem(BaseModel):
    """`type` may be left out. `phase` has no effect."""

    model_config = _STRICT

    type: Literal["message"] | None = None
    id: Given | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    status: Status | None = None
    phase: str | None = None


class FunctionCallInput(BaseModel):
    """`arguments` as the model wrote them, a JSON object as a rule."""

    model_config = _STRICT

    type: Literal["function_call"]
    id: Given | None = None
    call_id: Given
    name: Name
    arguments: str
    status: Status | None = None


class FunctionCallOutput(BaseModel):
    model_config = _STRICT

    type: Literal["function_call_output"]
    id: Given | None = None
    call_id: Given
    output: Content
    name: str | None = None
    status: Status | None = None


class SummaryText(BaseModel):
    model_config = _STRICT

    type: Literal["summary_text"]
    text: str


class ReasoningTextPart(BaseModel):
    model_config = _STRICT

    type: Literal["reasoning_text"]
    text: str


class ReasoningInput(BaseModel):
    """What the model thought before an earlier answer; its summary where the text itself is not known."""

    model_config = _STRICT

    type: Literal["reasoning"]
    id: Given | None = None
    summary: list[SummaryText] | None = None
    content: list[ReasoningTextPart] | None = None
    status: Status | None = None


class ItemReference(BaseModel):
    """An item of a stored response, its input or its output."""

    model_config = _STRICT

    type: Literal["item_reference"] | None = None
    id: Given


_ITEMS: Mapping[str, type[BaseModel]] = {
    "message": MessageItem,
    "function_call": FunctionCallInput,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningInput,
    "item_reference": ItemReference,
}


def _kind(item: Any) -> str:
    """Of an item as JSON, or parsed."""
    if isinstance(item, BaseModel):
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
    model = _ITEMS.get(kind := _kind(item))
    if model is None:
        raise _unsupported_type(kind, f"{where}.type", "input items", _ITEMS)
    for name in ("content", "output"):
        parts = item.get(name)
        if isinstance(parts, list) and kind != "reasoning":
            item = item | {name: [_only_supported_part(part, f"{where}.{name}[{i}]") for i, part in enumerate(parts)]}
    return check_names(item, model.model_fields, _UNSUPPORTED, f"{where}.")


def _only_supported_part(part: Any, where: str) -> Any:
    if not isinstance(part, dict):
        return part
    kind = part.get("type")
    if isinstance(kind, str) and kind not in _PARTS:
        raise _unsupported_type(kind, f"{where}.type", "content parts", _PARTS)
    return {name: value for name, value in part.items() if name != "file_id" or value is not None}


def _unsupported_type(kind: str, param: str, what: str, known: Any) -> ApiError:
    message = f"{what} of type {kind!r} are not supported, only {', '.join(map(repr, known))}"
    return ApiError(400, message, param=param, code="unsupported_parameter")


Items = Annotated[list[Item], BeforeValidator(_only_supported)]
Input = Annotated[str | Items, Field(union_mode="left_to_right")]

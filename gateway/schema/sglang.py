"""Parameters with another name in SGLang: accepted under both names."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, model_validator

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.schema.field import RequestId, field
from pagewire.gateway.schema.structured import Schema
from pagewire.v1.inference_pb2 import Model
from pagewire.wire.model_names import not_served

# SGLang's name -> ours.
OF_SGLANG = {
    "rid": "request_id",
    "no_stop_trim": "include_stop_str_in_output",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
}


class SglangParameters(BoundedModel):
    """Copies each parameter that has SGLang's name to ours."""

    rid: RequestId | None = field("gateway", "SGLang's name of `request_id`.")
    no_stop_trim: bool | None = field("tokenizer", "SGLang's name of `include_stop_str_in_output`.", False)
    json_schema: Annotated[str | Schema | None, Field(union_mode="left_to_right")] = field(
        "executor", "SGLang's way to set the form of the output: a JSON schema."
    )
    regex: str | None = field("executor", "A regular expression (Rust's syntax) for the whole output.")
    ebnf: str | None = field("executor", "A grammar in GBNF or Lark.")
    lora_path: str | None = field("tokenizer", "The name of an adapter; `model` may name its model beside it.")
    _named_model: str | None = PrivateAttr(None)  # beside lora_path

    @model_validator(mode="after")
    def _by_our_names(self) -> Any:
        for name, ours in OF_SGLANG.items():
            if (value := getattr(self, name)) is None:
                continue
            if getattr(self, ours) is not None:
                raise ApiError(400, f"{name} and {ours} are the same parameter: give one of them", param=name)
            setattr(self, ours, value)
        if self.lora_path:
            self._named_model = getattr(self, "model", None)
            setattr(self, "model", self.lora_path)  # noqa: B010 - a field of the bodies
        return self

    async def check_model(self, list_models: Callable[[], Awaitable[Iterable[Model]]]) -> None:
        """Raises ApiError for a model beside `lora_path` that is not served, or is another adapter."""
        if not (named := self._named_model) or named == self.lora_path:
            return
        parents = {one.id: one.parent for one in await list_models()}
        base, _, rest = named.partition(":")
        if named not in parents and rest and parents.get(base) == "":  # model:adapter
            named = rest
        if (parent := parents.get(named)) is None:
            raise ApiError(404, not_served(named, parents), param="model", code="model_not_found")
        if parent and named != self.lora_path:
            raise ApiError(400, "model and lora_path name different adapters: give one of them", param="lora_path")

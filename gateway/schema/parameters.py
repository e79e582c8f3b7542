"""The base of all request bodies, which refuses unknown names, and types that several bodies share."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
)

from pagewire.config.sampling_params import INT32_MAX, LOGIT_BIAS, MAX_CACHE_SALT
from pagewire.gateway.core.reading.bounded import BoundedModel
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.schema.unsupported import REFUSED, UNSUPPORTED, refused_names

MODEL = "A served model or an adapter; unset: the first model."
LABEL = "A label that does not change the answer."
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
TokenIdList = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
# One prompt or several, each as text or token ids.
Prompts = Annotated[
    str
    | TokenIdList
    | Annotated[list[str], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIdList], Field(min_length=1, fail_fast=True)],
    Field(union_mode="left_to_right"),
]
CacheSalt = Annotated[str, StringConstraints(min_length=1, max_length=MAX_CACHE_SALT)]
StopString = Annotated[str, StringConstraints(min_length=1)]
# Each choice of each prompt has a copy.
MAX_STOP_STRINGS = 1024
MAX_BIASED_TOKENS = 65_536
MAX_ID_DIGITS = 10
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]


def _logit_bias(bias: dict[str, float]) -> dict[str, float]:
    for token_id, value in bias.items():
        if not token_id.isdecimal() or len(token_id) > MAX_ID_DIGITS or int(token_id) > INT32_MAX:
            raise ValueError(f"keys are token ids in decimal, not {token_id[: 2 * MAX_ID_DIGITS]!r}")
        if value not in LOGIT_BIAS:
            raise ValueError(f"the bias of token {token_id} must be {LOGIT_BIAS}, not {value:g}")
    return bias


LogitBias = Annotated[
    dict[str, float],
    Field(max_length=MAX_BIASED_TOKENS),
    AfterValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {
                "^[0-9]{1,9}$": {"type": "number", "minimum": LOGIT_BIAS.minimum, "maximum": LOGIT_BIAS.maximum}
            },
            "additionalProperties": False,
        }
    ),
]


class Parameters(BoundedModel):
    """A request body without conversions: text is not a number, and a number is not a boolean."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, Refused]] = UNSUPPORTED

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        document = handler(schema)
        described = handler.resolve_ref_schema(document)
        described[REFUSED] = refused_names(cls.model_fields, cls.unsupported)
        return document


def as_list(prompts: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """Returns the prompts, each as text or token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]

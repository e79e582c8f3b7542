"""Bodies and answers of the routes for operators."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.schema.field import field
from pagewire.gateway.schema.parameters import Parameters
from pagewire.gateway.schema.unsupported import Refused


class AbortBody(Parameters):
    """Which requests end, with what they have so far and `finish_reason: abort`: some, or all."""

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    request_ids: Annotated[list[str], Field(min_length=1)] | None = field(
        "tokenizer", "Their `request_id`, `X-Request-Id`, or the `id` of their answer."
    )
    rid: str | list[str] | None = field("tokenizer", "SGLang's name of `request_ids`.", union_mode="left_to_right")
    abort_all: bool | None = field(
        "tokenizer", "All of the tenant; with a key that may, or without tenants: of all.", False
    )

    @model_validator(mode="after")
    def _says_which(self) -> "AbortBody":
        if not self.abort_all and not self.ids:
            raise ApiError(400, "give request_ids (or rid), or abort_all: true", param="request_ids")
        return self

    @property
    def ids(self) -> list[str]:
        rids = [self.rid] if isinstance(self.rid, str) else self.rid or []
        return [name for name in (*(self.request_ids or ()), *rids) if name]


class Aborted(Body):
    """`aborted`: how many generations were ended; each of `n` choices is one."""

    status: Literal["aborted"]
    aborted: int


class ServerLoad(Body):
    """Requests that wait or run, of all gateways of this server."""

    server_load: int


class TokenizerInfo(Body, kw_only=True):
    """What tokenizer_config.json says, in the model's words."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    chat_template: str | UnsetType = UNSET
    tool_chat_template: str | UnsetType = UNSET
    vocab_size: int
    model_max_length: int | None
    special_tokens: dict[str, str]


class ServedModel(Body, kw_only=True):
    """What SGLang's clients ask about a model."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    max_model_len: int | None
    weight_version: str  # of an executor's weights; while they are replaced, others may have others


class ServerInfo(Body, kw_only=True):
    """What is served, and by what."""

    version: str
    model_path: str
    served_model_names: list[str]
    is_generation: bool
    max_model_len: int | None
    num_requests: int


class Health(Body):
    status: Literal["ok", "unavailable"]
    reason: str | UnsetType = UNSET


class Version(Body):
    version: str

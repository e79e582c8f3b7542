"""Requests and answers of the routes for operators."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.schema.field import field
from pagewire.gateway.schema.parameters import Parameters


class AbortBody(Parameters):
    """The requests to abort: some or all. They end with their output until then and `finish_reason: abort`."""

    unsupported: ClassVar[Mapping[str, Refused]] = {}

    request_ids: Annotated[list[str], Field(min_length=1)] | None = field(
        "tokenizer", "Their `request_id`, `X-Request-Id`, or the `id` of their answers."
    )
    rid: str | list[str] | None = field("tokenizer", "SGLang's name of `request_ids`.", union_mode="left_to_right")
    abort_all: bool | None = field(
        "tokenizer", "All requests of the tenant; with an admin key or without tenants, all requests.", False
    )

    @model_validator(mode="after")
    def _says_which(self) -> "AbortBody":
        if not self.abort_all and not self.ids:
            raise ApiError(400, "give request_ids (or rid) or abort_all: true", param="request_ids")
        return self

    @property
    def ids(self) -> list[str]:
        rids = [self.rid] if isinstance(self.rid, str) else self.rid or []
        return [name for name in (*(self.request_ids or ()), *rids) if name]


class Aborted(Body):
    """The result of an abort. `aborted`: the number of generations; each of `n` choices is one."""

    status: Literal["aborted"]
    aborted: int


class ServerLoad(Body):
    """The number of waiting and running requests of all gateways of this server."""

    server_load: int


class TokenizerInfo(Body, kw_only=True):
    """Members of tokenizer_config.json."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    chat_template: str | UnsetType = UNSET
    tool_chat_template: str | UnsetType = UNSET
    vocab_size: int
    model_max_length: int | None
    special_tokens: dict[str, str]


class ServedModel(Body, kw_only=True):
    """A served model, for SGLang's clients."""

    model_path: str
    tokenizer_path: str
    is_generation: bool
    served_model_name: str
    max_model_len: int | None
    weight_version: str  # of one executor; others may differ while weights are replaced


class ServerInfo(Body, kw_only=True):
    """The served model and the server."""

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

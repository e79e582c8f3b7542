"""The request and the answer of Cohere's /v2/embed."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, UnsetType
from msgspec import field as field_of
from pydantic import Field, model_validator

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.schema.field import RequestId, field, required
from pagewire.gateway.schema.parameters import MODEL, Parameters
from pagewire.gateway.schema.unsupported import Refused

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering"]
_IMAGES = "images are not embedded"


class CohereEmbedRequest(Parameters):
    unsupported: ClassVar[Mapping[str, Refused]] = {
        "images": Refused(_IMAGES, ([],)),
        "inputs": Refused(f"{_IMAGES}; see texts", ([],)),
        "priority": Refused("texts wait in the order in which they came", (0,)),
    }

    model: str | None = field("tokenizer", MODEL)
    texts: Annotated[list[str], Field(min_length=1, fail_fast=True)] = required("tokenizer", "The texts.")
    input_type: InputType | None = field(
        "tokenizer",
        "What the texts are for: the model's prompt for that, if it has one (`query`; `document` or `passage`; "
        "`classification`; `clustering`), is put before each.",
    )
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = field(
        "gateway",
        "Numbers; base64 of them as little-endian float32; or their signs, eight in a byte, `ubinary` 0 to 255 and "
        "`binary` 128 less.",
        ["float"],
    )
    truncate: Literal["NONE", "START", "END"] | None = field(
        "tokenizer", "Which end of a longer text is cut off; NONE: it is refused.", "END"
    )
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "tokenizer", "The longest text, unless the model takes less."
    )
    output_dimension: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "tokenizer", "First numbers of each vector that are wanted, of a model trained for it."
    )
    request_id: RequestId | None = field("gateway", "Takes precedence over `X-Request-Id`.")

    @model_validator(mode="after")
    def _cuts_to_something(self) -> "CohereEmbedRequest":
        if self.max_tokens is not None and self.truncate == "NONE":
            raise ApiError(400, "max_tokens says where to cut: truncate must be START or END", param="max_tokens")
        return self


class CohereEmbeddings(Body):
    """The vectors in each type that was asked for."""

    float_: list[list[float]] | UnsetType = field_of(name="float", default=UNSET)
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class CohereApiVersion(Body):
    version: Literal["2"] = "2"


class CohereUnits(Body):
    input_tokens: int


class CohereMeta(Body):
    api_version: CohereApiVersion
    billed_units: CohereUnits


class CohereEmbedResponse(Body, kw_only=True):
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: CohereMeta

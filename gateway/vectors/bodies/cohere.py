"""The request and the answer of Cohere's /v2/embed."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from msgspec import UNSET, UnsetType
from msgspec import field as field_of
from pydantic import Field, model_validator

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.names import Refused
from pagewire.gateway.schema.field import RequestId, field, required
from pagewire.gateway.schema.parameters import MODEL, Parameters

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering"]
_IMAGES = "images cannot be embedded"


class CohereEmbedRequest(Parameters):
    unsupported: ClassVar[Mapping[str, Refused]] = {
        "images": Refused(_IMAGES, ([],)),
        "inputs": Refused(f"{_IMAGES}; see texts", ([],)),
        "priority": Refused("texts are computed in the order of arrival", (0,)),
    }

    model: str | None = field("tokenizer", MODEL)
    texts: Annotated[list[str], Field(min_length=1, fail_fast=True)] = required("tokenizer", "The texts.")
    input_type: InputType | None = field(
        "tokenizer",
        "The use of the texts. The model's prompt for it, if there is one (`query`; `document` or `passage`; "
        "`classification`; `clustering`), comes before each.",
    )
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = field(
        "gateway",
        "Numbers; base64 of little-endian float32; or the signs, eight in a byte, as `ubinary` from 0 to 255 or as "
        "`binary` from -128 to 127.",
        ["float"],
    )
    truncate: Literal["NONE", "START", "END"] | None = field(
        "tokenizer", "The end of a longer text that is cut off; NONE: refuse it.", "END"
    )
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "tokenizer", "Most tokens of a text, unless the model takes fewer."
    )
    output_dimension: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = field(
        "tokenizer", "Return only the first numbers of each vector; for models trained for it."
    )
    request_id: RequestId | None = field("gateway", "Takes precedence over `X-Request-Id`.")

    @model_validator(mode="after")
    def _cuts_to_something(self) -> "CohereEmbedRequest":
        if self.max_tokens is not None and self.truncate == "NONE":
            raise ApiError(400, "max_tokens needs truncate: START or END", param="max_tokens")
        return self


class CohereEmbeddings(Body):
    """The vectors in each requested type."""

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

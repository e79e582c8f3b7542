"""Cohere's /v2/embed: its body, and an answer with the vectors in each wanted type."""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, UnsetType
from msgspec import field as field_of
from pydantic import Field, model_validator

from pagewire.config.sampling_params import INT32_MAX
from pagewire.gateway.core.body import Body
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.head import Head
from pagewire.gateway.schema.field import RequestId, field, required
from pagewire.gateway.schema.parameters import MODEL, Parameters
from pagewire.gateway.schema.unsupported import Refused
from pagewire.gateway.vectors.answers import base64_of, check_number, encoded_items
from pagewire.gateway.vectors.calls import VectorCall
from pagewire.v1 import common_pb2, inference_pb2

EmbeddingType = Literal["float", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering"]
# What sentence-transformers' files call the prompt of a use, Cohere's own name first.
_PROMPT_NAMES: Mapping[InputType, tuple[str, ...]] = {
    "search_document": ("search_document", "document", "passage"),
    "search_query": ("search_query", "query"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
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


async def embed(call: VectorCall, body: CohereEmbedRequest, head: Head) -> CohereEmbedResponse:
    check_number(len(body.texts), "texts")
    types = list(dict.fromkeys(body.embedding_types or ("float",)))

    def items(answer: inference_pb2.EmbedResponse, start: int) -> Iterator[object]:
        for vector in answer.embeddings:
            for type_ in types:
                yield _WRITTEN[type_](vector)

    inputs = (inference_pb2.InputText(text=text) for text in body.texts)
    answers = call.answers(call.tokenizer.inference.Embed, await _embed_request(call, body), inputs)
    data = await encoded_items(answers, items, len(body.texts) * len(types))
    of_types: dict[str, Any] = {
        "float_" if type_ == "float" else type_: data[place :: len(types)] for place, type_ in enumerate(types)
    }
    meta = CohereMeta(CohereApiVersion(), CohereUnits(call.prompt_tokens))
    return CohereEmbedResponse(id=head.id, embeddings=CohereEmbeddings(**of_types), texts=body.texts, meta=meta)


async def _embed_request(call: VectorCall, body: CohereEmbedRequest) -> inference_pb2.EmbedRequest:
    options = inference_pb2.InputOptions(truncate_start=body.truncate == "START")
    if body.truncate != "NONE":
        options.truncate_prompt_tokens = -1
    if body.max_tokens is not None:
        takes = (await call.tokenizer.list_models())[0].max_model_len
        options.truncate_prompt_tokens = min(body.max_tokens, takes)
    return inference_pb2.EmbedRequest(
        model=body.model or "",
        options=options,
        dimensions=body.output_dimension,
        preferred_prompt_names=() if body.input_type is None else _PROMPT_NAMES[body.input_type],
    )


def _ubinary(vector: common_pb2.Vector) -> list[int]:
    """The signs, the first in the highest bit; the last byte is filled with zeros."""
    signs = "".join("1" if value > 0 else "0" for value in vector.values)
    num_bytes = -(-len(signs) // 8)
    return list(int(signs.ljust(8 * num_bytes, "0"), 2).to_bytes(num_bytes, "big"))


_WRITTEN: Mapping[EmbeddingType, Callable[[common_pb2.Vector], object]] = {
    "float": lambda vector: list(vector.values),
    "binary": lambda vector: [byte - 128 for byte in _ubinary(vector)],
    "ubinary": _ubinary,
    "base64": base64_of,
}

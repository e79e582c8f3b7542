"""Cohere's /v2/embed: its call of the tokenizer service, and the vectors in each wanted type."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pagewire.gateway.generation.head import Head
from pagewire.gateway.vectors.answer import base64_of, encoded_items
from pagewire.gateway.vectors.bodies.cohere import (
    CohereApiVersion,
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereEmbedResponse,
    CohereMeta,
    CohereUnits,
    EmbeddingType,
    InputType,
)
from pagewire.gateway.vectors.calls import VectorCall
from pagewire.gateway.vectors.translate import check_number
from pagewire.v1 import common_pb2, inference_pb2

# The names of a use's prompt in sentence-transformers' files, Cohere's name first.
_PROMPT_NAMES: Mapping[InputType, tuple[str, ...]] = {
    "search_document": ("search_document", "document", "passage"),
    "search_query": ("search_query", "query"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


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
    """Returns the signs as bytes, the first in the highest bit; zeros fill the last byte."""
    signs = "".join("1" if value > 0 else "0" for value in vector.values)
    num_bytes = -(-len(signs) // 8)
    return list(int(signs.ljust(8 * num_bytes, "0"), 2).to_bytes(num_bytes, "big"))


_WRITTEN: Mapping[EmbeddingType, Callable[[common_pb2.Vector], object]] = {
    "float": lambda vector: list(vector.values),
    "binary": lambda vector: [byte - 128 for byte in _ubinary(vector)],
    "ubinary": _ubinary,
    "base64": base64_of,
}

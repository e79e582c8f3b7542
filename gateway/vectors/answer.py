"""Answers with vectors and scores, from those of the tokenizer service."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from msgspec import UNSET, Raw

from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.head import Head
from pagewire.gateway.vectors.bodies.answers import (
    Classification,
    ClassificationResponse,
    Embedding,
    EmbeddingResponse,
    PooledVector,
    PoolingResponse,
    RankedDocument,
    RankedText,
    RerankResponse,
    Score,
    ScoreResponse,
    VectorData,
    VectorUsage,
)
from pagewire.gateway.vectors.bodies.requests import (
    ClassificationRequest,
    EmbeddingRequest,
    PairParameters,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    text_of,
    texts_of,
)
from pagewire.gateway.vectors.calls import VectorCall
from pagewire.gateway.vectors.translate import (
    classify_request,
    embed_request,
    inputs_of,
    num_inputs,
    pairs_of,
    score_request,
)
from pagewire.v1 import common_pb2, inference_pb2

MAX_ANSWER_BYTES = 256 * 1024 * 1024
# Vectors that are encoded without a pause: a millisecond or two.
ENCODED_AT_ONCE = 16

Answer = TypeVar("Answer")


async def embeddings(call: VectorCall, body: EmbeddingRequest, head: Head) -> EmbeddingResponse:
    embed = call.tokenizer.inference.Embed

    def items(answer: inference_pb2.EmbedResponse, start: int) -> Iterator[Embedding]:
        for index, vector in enumerate(answer.embeddings, start):
            yield Embedding(index=index, embedding=_numbers(vector, body))

    answers = call.answers(embed, embed_request(body), inputs_of(body))
    data = await encoded_items(answers, items, num_inputs(body))
    return EmbeddingResponse(id=head.id, created=head.created, model=head.model, data=data, usage=_usage(call))


async def pooling(call: VectorCall, body: PoolingRequest, head: Head) -> PoolingResponse:
    inference, task = call.tokenizer.inference, body.task
    if task is None:
        kind = (await call.tokenizer.list_models())[0].kind
        task = "classify" if kind == common_pb2.MODEL_KIND_CLASSIFY else "embed"
    if task == "embed":
        answers = call.answers(inference.Embed, embed_request(body), inputs_of(body))
    elif body.dimensions is not None or body.prompt_name is not None:
        raise ApiError(400, "dimensions and prompt_name need a model that embeds; remove them", param="dimensions")
    else:
        answers = call.answers(inference.Classify, classify_request(body), inputs_of(body))

    def items(
        answer: inference_pb2.EmbedResponse | inference_pb2.ClassifyResponse, start: int
    ) -> Iterator[PooledVector]:
        vectors = answer.embeddings if isinstance(answer, inference_pb2.EmbedResponse) else answer.scores
        for index, vector in enumerate(vectors, start):
            yield PooledVector(index=index, data=_numbers(vector, body))

    data = await encoded_items(answers, items, num_inputs(body))
    return PoolingResponse(id=head.id, created=head.created, model=head.model, data=data, usage=_usage(call))


async def classification(call: VectorCall, body: ClassificationRequest, head: Head) -> ClassificationResponse:
    classify = call.tokenizer.inference.Classify

    def items(answer: inference_pb2.ClassifyResponse, start: int) -> Iterator[Classification]:
        for index, scores in enumerate(answer.scores, start):
            probs = list(scores.values)
            label = answer.labels[probs.index(max(probs))]
            yield Classification(index=index, label=label, probs=probs, num_classes=len(probs))

    data = await encoded_items(call.answers(classify, classify_request(body), inputs_of(body)), items, num_inputs(body))
    return ClassificationResponse(id=head.id, created=head.created, model=head.model, data=data, usage=_usage(call))


async def scores(call: VectorCall, body: ScoreRequest, head: Head) -> ScoreResponse:
    data = [Score(index=index, score=score) for index, score in enumerate(await _scores(call, body, *body.sides()))]
    return ScoreResponse(id=head.id, created=head.created, model=head.model, data=data, usage=_usage(call))


async def ranking(call: VectorCall, body: RerankRequest, head: Head) -> RerankResponse:
    documents = texts_of(body.documents)
    of_documents = await _scores(call, body, [text_of(body.query)] * len(documents), documents)
    best = sorted(range(len(documents)), key=lambda index: -of_documents[index])[: body.top_n or None]
    with_text = body.return_documents is not False
    results = [
        RankedDocument(
            index=index,
            document=RankedText(documents[index]) if with_text else UNSET,
            relevance_score=of_documents[index],
        )
        for index in best
    ]
    return RerankResponse(id=head.id, model=head.model, usage=_usage(call), results=results)


async def encoded_items(
    answers: AsyncGenerator[Answer, None], items: Callable[[Answer, int], Iterable[object]], num_inputs: int
) -> list[Any]:
    """Returns the encoded items of the answers. Encoding all at once would delay the tokens of other requests.

    items: (answer, index of its first item) -> items.
    """
    data: list[Raw] = []
    size = 0
    async with aclosing(answers):
        async for answer in answers:
            for item in items(answer, len(data)):
                encoded = encode(item)
                data.append(Raw(encoded))
                size += len(encoded)
                if len(data) % ENCODED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if (whole := size // len(data) * num_inputs) > MAX_ANSWER_BYTES:
                message = f"the answer would have {whole} bytes; {MAX_ANSWER_BYTES} are possible: send fewer inputs"
                raise ApiError(400, message, param="input")
    return data


async def _scores(call: VectorCall, body: PairParameters, first: Sequence[str], second: Sequence[str]) -> list[float]:
    """Returns the score of each first text with the second text at the same place."""
    result: list[float] = []
    pairs = pairs_of(first, second)
    async with aclosing(call.answers(call.tokenizer.inference.Score, score_request(body), pairs)) as answers:
        async for answer in answers:
            result += answer.scores
    return result


def _numbers(vector: common_pb2.Vector, body: EmbeddingRequest) -> VectorData:
    return base64_of(vector) if body.encoding_format == "base64" else list(vector.values)


def base64_of(vector: common_pb2.Vector) -> str:
    # The only field of the message is packed: its bytes end with the little-endian numbers.
    return b64encode(vector.SerializeToString()[-4 * len(vector.values) :]).decode()


def _usage(call: VectorCall) -> VectorUsage:
    return VectorUsage(prompt_tokens=call.prompt_tokens, total_tokens=call.prompt_tokens)

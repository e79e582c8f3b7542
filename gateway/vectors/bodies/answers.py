"""The answers with vectors and scores."""

from typing import Literal

from msgspec import UNSET, UnsetType

from pagewire.gateway.core.body import Body

# Numbers; or base64 of them as little-endian float32.
VectorData = list[float] | str


class VectorUsage(Body):
    prompt_tokens: int
    total_tokens: int


class Embedding(Body, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: VectorData


class EmbeddingResponse(Body, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: VectorUsage


class Classification(Body):
    """The score of each label, and the label with the highest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(Body, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classification]
    usage: VectorUsage


class PooledVector(Body, kw_only=True):
    index: int
    object: Literal["pooling"] = "pooling"
    data: VectorData


class PoolingResponse(Body, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PooledVector]
    usage: VectorUsage


class Score(Body, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreResponse(Body, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class RankedText(Body):
    text: str


class RankedDocument(Body, kw_only=True):
    index: int
    document: RankedText | UnsetType = UNSET
    relevance_score: float


class RerankResponse(Body):
    id: str
    model: str
    usage: VectorUsage
    # The best first.
    results: list[RankedDocument]

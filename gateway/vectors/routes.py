"""The routes for embeddings, scores and classes."""

from fastapi import APIRouter, Request

from pagewire.gateway.core.reading.json_route import JsonRoute
from pagewire.gateway.vectors import answer
from pagewire.gateway.vectors.bodies.answers import (
    ClassificationResponse,
    EmbeddingResponse,
    PoolingResponse,
    RerankResponse,
    ScoreResponse,
)
from pagewire.gateway.vectors.bodies.cohere import CohereEmbedRequest, CohereEmbedResponse
from pagewire.gateway.vectors.bodies.requests import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from pagewire.gateway.vectors.calls import serve
from pagewire.gateway.vectors.cohere import embed as cohere_embed

router = APIRouter(route_class=JsonRoute, tags=["vectors"])


@router.post("/v1/embeddings")
async def create_embeddings(request: Request, body: EmbeddingRequest) -> EmbeddingResponse:
    """Returns the vector of each input; for models that embed."""
    return await serve(request, "embeddings", "embd", body, answer.embeddings)


@router.post("/v2/embed")
async def create_cohere_embeddings(request: Request, body: CohereEmbedRequest) -> CohereEmbedResponse:
    """Returns the vector of each text in one or several types, in Cohere's own API; for models that embed."""
    return await serve(request, "embed", "embd", body, cohere_embed)


@router.post("/pooling")
@router.post("/v1/pooling")
async def create_pooling(request: Request, body: PoolingRequest) -> PoolingResponse:
    """Returns the embedding of each input, or the score of each label."""
    return await serve(request, "pooling", "pool", body, answer.pooling)


@router.post("/classify")
@router.post("/v1/classify")
async def create_classification(request: Request, body: ClassificationRequest) -> ClassificationResponse:
    """Returns the score of each label for each input; for models that classify."""
    return await serve(request, "classify", "classify", body, answer.classification)


@router.post("/score")
@router.post("/v1/score")
async def create_scores(request: Request, body: ScoreRequest) -> ScoreResponse:
    """Scores pairs of texts: with a model that classifies pairs with one label, or by the cosine of a model that
    embeds."""
    return await serve(request, "score", "score", body, answer.scores)


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def create_ranking(request: Request, body: RerankRequest) -> RerankResponse:
    """Sorts documents by their score with the query, the best first; the scores are those of `/score`."""
    return await serve(request, "rerank", "rerank", body, answer.ranking)

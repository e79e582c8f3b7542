"""Ollama's embeddings, as those of /v1/embeddings."""

from collections.abc import Iterator
from typing import Any

from fastapi import Request

from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.dialects.ollama.answers import OllamaEmbeddingsResponse, OllamaEmbedResponse
from pagewire.gateway.dialects.ollama.keep_alive import kept_alive, load_or_unload
from pagewire.gateway.dialects.ollama.models import find_model
from pagewire.gateway.dialects.ollama.requests import OllamaEmbeddingsRequest, OllamaEmbedRequest
from pagewire.gateway.generation.head import Head
from pagewire.gateway.models.models import MODELS
from pagewire.gateway.vectors.answer import encoded_items
from pagewire.gateway.vectors.bodies.requests import EmbeddingRequest
from pagewire.gateway.vectors.calls import VectorCall, serve
from pagewire.gateway.vectors.translate import embed_request, inputs_of, num_inputs
from pagewire.v1 import inference_pb2


async def embed(request: Request, body: OllamaEmbedRequest) -> OllamaEmbedResponse:
    models, served = MODELS.of(request), await find_model(MODELS.of(request), body.model)
    model = served.model
    if not body.input:
        await load_or_unload(models, served.line, body)
        return OllamaEmbedResponse(model=body.model, embeddings=[])
    wanted = EmbeddingRequest(
        model=model.id,
        input=body.input,
        dimensions=body.dimensions or None,
        truncate_prompt_tokens=None if body.truncate is False else _most(body, model),
    )
    rest = kept_alive(models, served.line, body)
    vectors, num_tokens = await serve(request, "embed", "embd", wanted, _vectors)
    if rest is not None:
        await rest()
    elapsed = int(request_context(request.scope).elapsed * 1e9)
    return OllamaEmbedResponse(
        model=body.model, embeddings=vectors, total_duration=elapsed, load_duration=0, prompt_eval_count=num_tokens
    )


async def embed_one(request: Request, body: OllamaEmbeddingsRequest) -> OllamaEmbeddingsResponse:
    models, served = MODELS.of(request), await find_model(MODELS.of(request), body.model)
    model = served.model
    if not body.prompt:
        await load_or_unload(models, served.line, body)
        return OllamaEmbeddingsResponse([])
    wanted = EmbeddingRequest(model=model.id, input=body.prompt, truncate_prompt_tokens=_most(body, model))

    async def compute(call: VectorCall, body: EmbeddingRequest, head: Head) -> tuple[list[Any], int]:
        request_context(request.scope).names = {"inputs[0]": "prompt", "inputs": "prompt", "input": "prompt"}
        return await _vectors(call, body, head)

    rest = kept_alive(models, served.line, body)
    vectors, _ = await serve(request, "embed", "embd", wanted, compute)
    if rest is not None:
        await rest()
    return OllamaEmbeddingsResponse(vectors[0])


def _most(body: OllamaEmbedRequest | OllamaEmbeddingsRequest, model: inference_pb2.Model) -> int:
    """Returns the most tokens of a text; -1: as many as the model takes."""
    most = body.options.num_ctx if body.options else None
    return -1 if most is None or most >= model.max_model_len else most


async def _vectors(call: VectorCall, body: EmbeddingRequest, head: Head) -> tuple[list[Any], int]:
    """Returns the encoded vectors, and the number of tokens."""

    def items(answer: inference_pb2.EmbedResponse, start: int) -> Iterator[list[float]]:
        for vector in answer.embeddings:
            yield list(vector.values)

    answers = call.answers(call.tokenizer.inference.Embed, embed_request(body), inputs_of(body))
    return await encoded_items(answers, items, num_inputs(body)), call.prompt_tokens

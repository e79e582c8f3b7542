"""Bodies for vectors and scores to the calls of the tokenizer service."""

from collections.abc import Iterator, Sequence
from typing import Any

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.prompt import fill_chat
from pagewire.gateway.schema.parameters import as_list
from pagewire.gateway.vectors.bodies.cohere import CohereEmbedRequest
from pagewire.gateway.vectors.bodies.requests import (
    SIDES,
    EmbeddingRequest,
    InputParameters,
    PairParameters,
    RerankRequest,
    ScoreRequest,
    VectorParameters,
)
from pagewire.v1 import inference_pb2

MAX_INPUTS = 65_536
# The limit for all pairs of a request, which may repeat one text.
MAX_PAIR_CHARACTERS = 128 * 1024 * 1024


def names_of(body: Any) -> dict[str, str]:
    """Returns the body's names for fields of the tokenizer's calls, and for the scheduler's: there, each text is the
    prompt of a request."""
    if isinstance(body, CohereEmbedRequest):
        return {
            "inputs": "texts",
            "prompt": "texts",
            "dimensions": "output_dimension",
            "truncate_prompt_tokens": "max_tokens",
        }
    if isinstance(body, RerankRequest):
        return {"pairs": "documents", "prompt": "documents"}
    if isinstance(body, ScoreRequest):
        second = next(name for _, name in SIDES if getattr(body, name) is not None)
        return {"pairs": second, "prompt": second} | (
            {} if isinstance(getattr(body, second), list) else {"pairs[0]": second}
        )
    if not isinstance(body, InputParameters):
        return {}
    if body.input is None:
        return {"inputs[0].chat": "messages", "inputs[0]": "messages", "prompt": "messages"}
    is_list = isinstance(body.input, list) and not isinstance(body.input[0], int)
    return {"inputs": "input", "prompt": "input"} | ({} if is_list else {"inputs[0]": "input"})


def embed_request(body: EmbeddingRequest) -> inference_pb2.EmbedRequest:
    return inference_pb2.EmbedRequest(
        model=body.model or "", options=_options(body), prompt_name=body.prompt_name, dimensions=body.dimensions
    )


def classify_request(body: InputParameters) -> inference_pb2.ClassifyRequest:
    return inference_pb2.ClassifyRequest(model=body.model or "", options=_options(body))


def _options(body: VectorParameters) -> inference_pb2.InputOptions:
    return inference_pb2.InputOptions(
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        cache_salt=body.cache_salt,
        truncate_start=body.truncation_side == "left",
    )


def num_inputs(body: InputParameters) -> int:
    return 1 if body.input is None else len(as_list(body.input))


def inputs_of(body: InputParameters) -> Iterator[inference_pb2.InputText]:
    if body.input is None:
        given = inference_pb2.InputText()
        fill_chat(given.chat, body.messages or (), body)
        if not given.chat.HasField("add_generation_prompt"):
            given.chat.add_generation_prompt = False  # the model does not answer
        return iter([given])
    check_number(num_inputs(body), "input")
    return map(_input, as_list(body.input))


def _input(given: str | list[int]) -> inference_pb2.InputText:
    if isinstance(given, str):
        return inference_pb2.InputText(text=given)
    return inference_pb2.InputText(token_ids=inference_pb2.TokenIds(ids=given))


def check_number(num_inputs: int, name: str) -> None:
    if num_inputs > MAX_INPUTS:
        raise ApiError(400, f"{name} has {num_inputs} entries; at most {MAX_INPUTS} are possible", param=name)


def score_request(body: PairParameters) -> inference_pb2.ScoreRequest:
    return inference_pb2.ScoreRequest(
        model=body.model or "",
        options=_options(body),
        max_tokens_per_query=body.max_tokens_per_query or 0,
        max_tokens_per_doc=body.max_tokens_per_doc or 0,
    )


def pairs_of(first: Sequence[str], second: Sequence[str]) -> Iterator[inference_pb2.InputText]:
    """Returns the pairs of a score. Raises ApiError 400 if they are too many, or too long."""
    check_number(len(first), "pairs")
    if (size := sum(map(len, first)) + sum(map(len, second))) > MAX_PAIR_CHARACTERS:
        raise ApiError(
            400, f"the pairs have {size} characters; {MAX_PAIR_CHARACTERS} are possible: send fewer documents"
        )
    return (inference_pb2.InputText(text=text, text_pair=pair) for text, pair in zip(first, second, strict=True))

"""Conversations that are too long for the model: their beginning is dropped."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.v1.inference_pb2 import GenerateRequest, TokenizeRequest

Item = TypeVar("Item")


async def shortened(
    tokenizer: TokenizerClient,
    items: Sequence[Item],
    request_of: Callable[[Sequence[Item]], GenerateRequest],
    role_of: Callable[[Item], str],
    limit: int | None = None,
) -> GenerateRequest:
    """Returns the request with the most items that fit. If none fit, it has the fewest, and is refused upstream.

    System and developer messages at the beginning stay. The rest begins with a user's message, so that calls keep their
    outputs.

    limit: most tokens of the prompt, if that is less than the model takes.
    """
    request = request_of(items)
    if await _fits(tokenizer, request, limit):
        return request
    begin = next((i for i, item in enumerate(items) if role_of(item) not in ("system", "developer")), len(items))
    cuts = [i for i, item in enumerate(items) if i > begin and role_of(item) == "user"]
    low, high = 0, len(cuts)  # cuts before `low` leave too much
    while low < high:
        middle = (low + high) // 2
        if await _fits(tokenizer, request_of([*items[:begin], *items[cuts[middle] :]]), limit):
            high = middle
        else:
            low = middle + 1
    if not cuts:
        return request
    return request_of([*items[:begin], *items[cuts[min(low, len(cuts) - 1)] :]])


async def count_tokens(tokenizer: TokenizerClient, request: GenerateRequest) -> tuple[int, int]:
    """Returns (tokens of the prompt without its images, most tokens of prompt and output; 0 = unknown)."""
    tokenize = TokenizeRequest(model=request.model, chat=request.chat, output_parsing=request.output_parsing)
    if request.HasField("add_special_tokens"):
        tokenize.add_special_tokens = request.add_special_tokens
    answer = await tokenizer.call(tokenizer.inference.Tokenize, tokenize)
    return len(answer.token_ids), answer.max_model_len


async def _fits(tokenizer: TokenizerClient, request: GenerateRequest, limit: int | None) -> bool:
    """Returns whether prompt and output fit; without max_tokens or if it may be lowered, an output of one token."""
    count, takes = await count_tokens(tokenizer, request)
    output = 1 if request.clamp_max_tokens else request.sampling_params.max_tokens or 1
    return (limit is None or count <= limit) and (not takes or count + output <= takes)

"""`truncation: "auto"`: drops the beginning of a conversation that is too long for the model."""

from collections.abc import Callable, Sequence

from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.responses.bodies.items import MessageItem
from pagewire.gateway.responses.conversation import AnyItem
from pagewire.v1.inference_pb2 import GenerateRequest, TokenizeRequest


async def shortened(
    tokenizer: TokenizerClient, items: Sequence[AnyItem], request_of: Callable[[Sequence[AnyItem]], GenerateRequest]
) -> GenerateRequest:
    """Returns the request with the most items that fit. If none fit, it has the fewest, and is refused upstream.

    System and developer messages at the beginning stay. The rest begins with a user's message, so that calls keep their
    outputs.
    """
    request = request_of(items)
    if await _fits(tokenizer, request):
        return request
    begin = next((i for i, item in enumerate(items) if not _is_message_of(item, "system", "developer")), len(items))
    cuts = [i for i, item in enumerate(items) if i > begin and _is_message_of(item, "user")]
    low, high = 0, len(cuts)  # cuts before `low` leave too much
    while low < high:
        middle = (low + high) // 2
        if await _fits(tokenizer, request_of([*items[:begin], *items[cuts[middle] :]])):
            high = middle
        else:
            low = middle + 1
    if not cuts:
        return request
    return request_of([*items[:begin], *items[cuts[min(low, len(cuts) - 1)] :]])


def _is_message_of(item: AnyItem, *roles: str) -> bool:
    return isinstance(item, MessageItem) and item.role in roles


async def count_tokens(tokenizer: TokenizerClient, request: GenerateRequest) -> tuple[int, int]:
    """Returns (tokens of the prompt without its images, most tokens of prompt and output; 0 = unknown)."""
    tokenize = TokenizeRequest(model=request.model, chat=request.chat, output_parsing=request.output_parsing)
    if request.HasField("add_special_tokens"):
        tokenize.add_special_tokens = request.add_special_tokens
    answer = await tokenizer.call(tokenizer.inference.Tokenize, tokenize)
    return len(answer.token_ids), answer.max_model_len


async def _fits(tokenizer: TokenizerClient, request: GenerateRequest) -> bool:
    """Returns whether prompt and output fit; without max_output_tokens, an output of one token."""
    count, limit = await count_tokens(tokenizer, request)
    return not limit or count + (request.sampling_params.max_tokens or 1) <= limit

"""`truncation: "auto"`: what was said first is left out of a conversation that is longer than the model takes."""

from collections.abc import Callable, Sequence

from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.responses.bodies.items import MessageItem
from pagewire.gateway.responses.conversation import AnyItem
from pagewire.v1.inference_pb2 import GenerateRequest, TokenizeRequest


async def shortened(
    tokenizer: TokenizerClient, items: Sequence[AnyItem], request_of: Callable[[Sequence[AnyItem]], GenerateRequest]
) -> GenerateRequest:
    """The request of the most items that fit, or of the fewest if none do: it is refused then with the numbers.

    What system or developer say at the beginning stays, and what is left begins with a user's message, so that no call
    is parted from its output.
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
    """(tokens of the prompt without its images, the most that prompt and output may have; 0 = not known)."""
    tokenize = TokenizeRequest(model=request.model, chat=request.chat)
    if request.HasField("add_special_tokens"):
        tokenize.add_special_tokens = request.add_special_tokens
    answer = await tokenizer.call(tokenizer.inference.Tokenize, tokenize)
    return len(answer.token_ids), answer.max_model_len


async def _fits(tokenizer: TokenizerClient, request: GenerateRequest) -> bool:
    """Where max_output_tokens is unset, there must be room for one."""
    count, limit = await count_tokens(tokenizer, request)
    return not limit or count + (request.sampling_params.max_tokens or 1) <= limit

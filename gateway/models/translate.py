"""Bodies of /tokenize to the tokenizer's requests."""

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.prompt import fill_chat
from pagewire.gateway.models.bodies import TokenizeRequest
from pagewire.v1 import inference_pb2


def tokenize_requests(body: TokenizeRequest) -> list[inference_pb2.TokenizeRequest]:
    """Returns one request for each text. Raises ApiError 400."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    texts = [body.prompt] if body.prompt is None or isinstance(body.prompt, str) else body.prompt
    requests = [
        inference_pb2.TokenizeRequest(
            model=body.model or "",
            return_token_strs=bool(body.return_token_strs),
            add_special_tokens=body.add_special_tokens,
            text=text,
        )
        for text in texts
    ]
    if body.messages is not None:
        fill_chat(requests[0].chat, body.messages, body)
    return requests

"""Prompts of requests to token ids: a text, a chat, or ids as they are."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.pool.text_limit import Room, TextTooLong
from pagewire.services.tokenizer.templates.chat import ChatError, TemplateError
from pagewire.services.tokenizer.templates.chat_messages import to_chat
from pagewire.v1 import common_pb2, inference_pb2

Request = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest


@dataclass(frozen=True)
class Prompt:
    """The tokens and images that the model reads; not to be changed."""

    token_ids: Sequence[int]  # may be empty
    images: Sequence[common_pb2.PromptImage] = ()


async def encode_prompt(pool: TokenizerPool, request: Request, room: Room | None = None) -> Prompt:
    """Encodes the prompt of a request. room: for its text; None: any length. Raises RpcError (INVALID_ARGUMENT)."""
    match request.WhichOneof("prompt"):
        case "text":
            try:
                return Prompt(await _encode_text(pool, request, room))
            except TextTooLong as error:
                raise invalid(str(error), "text") from error
        case "chat":
            return await _encode_chat(pool, request, room)
        case "token_ids":
            return Prompt(list(request.token_ids.ids))  # type: ignore[union-attr]
        case _:
            raise invalid("the request has no prompt; set text, chat or token_ids", "prompt")


async def _encode_text(pool: TokenizerPool, request: Request, room: Room | None) -> list[int]:
    adds = adds_special_tokens(request)
    if suffix := getattr(request, "suffix", ""):
        return await pool.encode_infill(request.text, suffix, add_special_tokens=adds, room=room)
    return await pool.encode_text(request.text, add_special_tokens=adds, room=room)


async def _encode_chat(pool: TokenizerPool, request: Request, room: Room | None) -> Prompt:
    images = await pool.images.read(request.chat)
    try:
        token_ids = await pool.encode_chat(
            to_chat(request.chat, request.output_parsing),
            add_special_tokens=adds_special_tokens(request),
            image_texts=images.texts,
            room=room,
        )
    except (ChatError, TextTooLong) as error:
        is_of_request = bool(request.chat.chat_template) and isinstance(error, TemplateError)
        raise invalid(str(error), "chat.chat_template" if is_of_request else "chat") from error
    return Prompt(token_ids, images.placed(token_ids))


def adds_special_tokens(request: Request) -> bool:
    """Returns whether special tokens are added: by default to a text, not to the output of a chat template."""
    if request.HasField("add_special_tokens"):
        return request.add_special_tokens
    return request.WhichOneof("prompt") == "text"

"""From a request's prompt to what the pool encodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.images.image_processor import ProcessedImage
from pagewire.services.tokenizer.images.images import image_field, prompt_images
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.pool.text_limit import Room, TextTooLong
from pagewire.services.tokenizer.templates.chat import ChatError
from pagewire.services.tokenizer.templates.chat_messages import to_chat
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError

Request = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest


@dataclass(frozen=True)
class Prompt:
    """What the model sees; not to be changed."""

    token_ids: Sequence[int]  # may be empty
    images: Sequence[common_pb2.PromptImage] = ()


async def encode_prompt(pool: TokenizerPool, request: Request, room: Room | None = None) -> Prompt:
    """room: for its text; None: of any length. Raises RpcError (INVALID_ARGUMENT)."""
    match request.WhichOneof("prompt"):
        case "text":
            try:
                add_special_tokens = adds_special_tokens(request)
                return Prompt(await pool.encode_text(request.text, add_special_tokens=add_special_tokens, room=room))
            except TextTooLong as error:
                raise invalid(str(error), "text") from error
        case "chat":
            return await _encode_chat(pool, request, room)
        case "token_ids":
            return Prompt(list(request.token_ids.ids))  # type: ignore[union-attr]
        case _:
            raise invalid("the request has no prompt; set text, chat or token_ids", "prompt")


async def _encode_chat(pool: TokenizerPool, request: Request, room: Room | None) -> Prompt:
    images = await _read_images(pool, request.chat)
    try:
        token_ids = await pool.encode_chat(
            to_chat(request.chat),
            add_special_tokens=adds_special_tokens(request),
            image_texts=[image.text for image in images],
            room=room,
        )
    except (ChatError, TextTooLong) as error:
        # Told by its text: a template of a request fails in another process.
        is_of_template = request.chat.chat_template and str(error).startswith("the chat template")
        raise invalid(str(error), "chat.chat_template" if is_of_template else "chat") from error
    return Prompt(token_ids, prompt_images(images, token_ids, pool.images.image_token_id) if images else ())


def room_for(request: inference_pb2.GenerateRequest, params: common_pb2.SamplingParams, max_model_len: int) -> Room:
    """What of the prompt has to be encoded; the others as in `truncated`."""
    if not max_model_len:
        return Room(0, counts=False)
    if not request.HasField("truncate_prompt_tokens"):
        return Room(max_model_len)
    most = _room(request.truncate_prompt_tokens, params, max_model_len)
    return Room(most, keeps="start" if request.truncate_end else "end")


def truncated(
    prompt: Prompt, request: inference_pb2.GenerateRequest, params: common_pb2.SamplingParams, max_model_len: int
) -> Prompt:
    """The end of the prompt, or its beginning, as truncate_prompt_tokens says.

    params: of the request, with defaults. max_model_len: 0 = not known yet.

    Raises RpcError (INVALID_ARGUMENT, UNAVAILABLE).
    """
    if not request.HasField("truncate_prompt_tokens"):
        return prompt
    if prompt.images:
        raise invalid("truncate_prompt_tokens is for text: leave it out, or the images", "truncate_prompt_tokens")
    most = _room(request.truncate_prompt_tokens, params, max_model_len)
    if len(prompt.token_ids) <= most:
        return prompt
    return Prompt(prompt.token_ids[:most] if request.truncate_end else prompt.token_ids[-most:])


def _room(wanted: int, params: common_pb2.SamplingParams, max_model_len: int) -> int:
    """How many tokens of the prompt are left."""
    if wanted != -1:
        if wanted < 1 or 0 < max_model_len < wanted:
            valid = f"within 1..{max_model_len}" if max_model_len else "at least 1"
            raise invalid(f"truncate_prompt_tokens is {wanted}; it must be -1 or {valid}", "truncate_prompt_tokens")
        return wanted
    if not max_model_len:
        raise RpcError(grpc.StatusCode.UNAVAILABLE, "the model is not loaded yet; try again later")
    max_tokens = max(1, params.max_tokens)
    if max_tokens >= max_model_len:
        raise invalid(
            f"max_tokens is {max_tokens}; the model takes {max_model_len} tokens, which leaves none for the prompt "
            "that truncate_prompt_tokens is to cut",
            "truncate_prompt_tokens",
        )
    return max_model_len - max_tokens


def image_urls(prompt: inference_pb2.ChatPrompt) -> list[str]:
    return [part.image.url for message in prompt.messages for part in message.parts if part.HasField("image")]


async def _read_images(pool: TokenizerPool, prompt: inference_pb2.ChatPrompt) -> list[ProcessedImage]:
    """Raises RpcError (INVALID_ARGUMENT), naming the part of the message that is wrong."""
    urls = image_urls(prompt)
    if not urls:
        return []
    try:
        return await pool.images.read(urls)
    except RpcError as error:
        fields = [
            f"chat.messages[{i}].parts[{j}].image.url"
            for i, message in enumerate(prompt.messages)
            for j, part in enumerate(message.parts)
            if part.HasField("image")
        ]
        for index, field in enumerate(fields):
            error = error.renamed(image_field(index), field)
        raise error from None


def adds_special_tokens(request: Request) -> bool:
    """By default to a text, not to what a chat template has made."""
    if request.HasField("add_special_tokens"):
        return request.add_special_tokens
    return request.WhichOneof("prompt") == "text"

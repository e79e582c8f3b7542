"""Encodes the inputs of Embed, Classify and Score."""

import asyncio
from collections.abc import Callable, Sequence

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.pool.input_encoding import Cuts, EncodedInput, cut
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.pool.text_limit import TextTooLong
from pagewire.services.tokenizer.templates.chat import ChatError
from pagewire.services.tokenizer.templates.chat_messages import check_chat, image_urls, to_chat
from pagewire.v1 import common_pb2, inference_pb2

# Texts that one worker of the pool encodes in a row.
TEXTS_PER_CALL = 32
# The most texts of one call in the pool: texts of other calls wait only for these.
PARTS_PER_WORKER = 2

Inputs = Sequence[inference_pb2.InputText]
# The name of an input in errors, from its index.
Name = Callable[[int], str]


async def encode(
    pool: TokenizerPool,
    inputs: Inputs,
    options: inference_pb2.InputOptions,
    info: common_pb2.ModelInfo,
    name: Name,
    *,
    prefix: str = "",
    cuts: Cuts,
) -> list[EncodedInput]:
    """Returns the tokens of each input. prefix: put before each text. Raises RpcError (INVALID_ARGUMENT)."""
    for index, given in enumerate(inputs):
        kind = given.WhichOneof("input")
        if kind is None or (kind != "text" and given.HasField("text_pair")):
            raise invalid(f"{name(index)} must have text, alone or with text_pair, or token_ids, or chat", name(index))
    pool.check_room()
    _check_lengths(pool, inputs, cuts, name)
    texts = iter(await _encode_texts(pool, inputs, options, prefix, cuts, name))
    encoded = []
    special = _special_ids(pool, options)
    for index, given in enumerate(inputs):
        match given.WhichOneof("input"):
            case "text":
                encoded.append(next(texts))
            case "chat":
                token_ids = await _encode_chat(pool, given.chat, options, name(index), cuts)
                encoded.append((cut(token_ids, cuts), 0))
            case _:
                _check_ids(given.token_ids.ids, special, info, name(index))
                encoded.append((cut(list(given.token_ids.ids), cuts), 0))
    for index, (token_ids, _) in enumerate(encoded):
        if not token_ids:
            raise invalid(f"{name(index)} has no tokens; it must have at least one", name(index))
        if len(token_ids) > info.max_model_len:
            raise invalid(
                f"{name(index)} has {len(token_ids)} tokens, the model takes {info.max_model_len}; shorten it, "
                "or set truncate_prompt_tokens",
                name(index),
            )
    return encoded


def _special_ids(pool: TokenizerPool, options: inference_pb2.InputOptions) -> set[int]:
    """Returns the tokens that every input of the model has; none if the client wants none."""
    if options.HasField("add_special_tokens") and not options.add_special_tokens:
        return set()
    return set(pool.codec.tokenizer.encode("", add_special_tokens=True))


def _check_ids(ids: Sequence[int], special: set[int], info: common_pb2.ModelInfo, name: str) -> None:
    """Refuses ids of another tokenizer: their vectors would be wrong. Raises RpcError (INVALID_ARGUMENT)."""
    remedy = "send text; with LangChain, OpenAIEmbeddings(check_embedding_ctx_length=False)"
    if ids and max(ids) >= info.vocab_size:
        last = info.vocab_size - 1
        raise invalid(f"{name} has the token id {max(ids)}, and the model's vocabulary ends at {last}; {remedy}", name)
    if ids and not special <= set(ids):
        raise invalid(
            f"{name} has token ids without the model's special tokens ({', '.join(map(str, sorted(special)))}), as "
            f"those of another tokenizer; {remedy}. With add_special_tokens false, ids are taken as they are",
            name,
        )


def _check_lengths(pool: TokenizerPool, inputs: Inputs, cuts: Cuts, name: Name) -> None:
    """Refuses texts that are too long before any is encoded; the workers find the others.

    Raises RpcError (INVALID_ARGUMENT).
    """
    first, second = cuts.room(is_second=False), cuts.room(is_second=True)
    for index, given in enumerate(inputs):
        try:
            if given.HasField("text"):
                pool.codec.limit.check(given.text, first)
            if given.HasField("text_pair"):
                pool.codec.limit.check(given.text_pair, second)
        except TextTooLong as error:
            raise invalid(_of_input(error, name(index)), name(index)) from error


def _of_input(error: TextTooLong, name: str) -> str:
    """Returns the message for an input, which is no prompt, and which may be cut."""
    said = str(error).replace("the prompt", "it")
    return f"{name}: {said} Or set truncate_prompt_tokens."


async def _encode_texts(
    pool: TokenizerPool, inputs: Inputs, options: inference_pb2.InputOptions, prefix: str, cuts: Cuts, name: Name
) -> list[EncodedInput]:
    texts = [
        (prefix + given.text, given.text_pair if given.HasField("text_pair") else None)
        for given in inputs
        if given.HasField("text")
    ]
    add_special_tokens = options.add_special_tokens if options.HasField("add_special_tokens") else True
    parts = [texts[start : start + TEXTS_PER_CALL] for start in range(0, len(texts), TEXTS_PER_CALL)]
    turns = asyncio.Semaphore(PARTS_PER_WORKER * pool.size)

    async def encode_part(part: Sequence[tuple[str, str | None]]) -> list[EncodedInput]:
        async with turns:
            return await pool.encode_inputs(part, add_special_tokens=add_special_tokens, cuts=cuts)

    try:
        of_parts = await asyncio.gather(*map(encode_part, parts))
    except TextTooLong as error:
        longest = max(range(len(inputs)), key=lambda index: len(inputs[index].text) + len(inputs[index].text_pair))
        raise invalid(_of_input(error, name(longest)), name(longest)) from error
    except ValueError as error:
        raise invalid(str(error)) from error
    return [encoded for part in of_parts for encoded in part]


async def _encode_chat(
    pool: TokenizerPool, chat: inference_pb2.ChatPrompt, options: inference_pb2.InputOptions, name: str, cuts: Cuts
) -> list[int]:
    if image_urls(chat):
        raise invalid(f"{name} has images; leave them out, as vectors are computed from text only", name)
    check_chat(chat)
    try:
        room = cuts.room(is_second=False)
        return await pool.encode_chat(to_chat(chat), add_special_tokens=options.add_special_tokens, room=room)
    except (ChatError, TextTooLong) as error:
        raise invalid(str(error), f"{name}.chat") from error


def whole_cut(options: inference_pb2.InputOptions, info: common_pb2.ModelInfo) -> int | None:
    """Returns truncate_prompt_tokens as a number of tokens. Raises RpcError (INVALID_ARGUMENT)."""
    if not options.HasField("truncate_prompt_tokens"):
        return None
    wanted = options.truncate_prompt_tokens
    if wanted == -1:
        return info.max_model_len
    if not 1 <= wanted <= info.max_model_len:
        raise invalid(
            f"truncate_prompt_tokens is {wanted}; it must be -1 or within 1..{info.max_model_len}",
            "options.truncate_prompt_tokens",
        )
    return wanted

"""Affinity: hashes of requests that should go to the same scheduler, where they find each other's prefix in the cache.

Two chats have the same beginning if all messages before the first one of the user are equal, as with a shared system
prompt; they are the same conversation if that first message is equal too. A chat that begins with the user's message
has no such beginning. A request without a chat is hashed by the beginning of its prompt. Every tokenizer service
computes the same hashes.
"""

import hashlib
from itertools import takewhile

from pagewire.services.tokenizer.received import Received
from pagewire.wire.streams import Affinity

_TEXT_CHARACTERS = 1024
_TOKENS = 256
_MESSAGE_BYTES = 64 * 1024  # images make messages long


def affinity_of(received: Received) -> Affinity:
    """Returns the hashes of a request."""
    request = received.request
    key = hashlib.blake2b(digest_size=16)
    for part in (received.context.tenant, request.cache_salt):
        key.update(part.encode())
        key.update(b"\0")
    kind, beginning = request.WhichOneof("prompt"), b""
    if kind == "chat":
        messages = request.chat.messages
        before = list(takewhile(lambda message: message.role != "user", messages))
        for number, message in enumerate(messages[: len(before) + 1]):
            if number == len(before) > 0:
                beginning = key.digest()
            key.update(message.SerializeToString(deterministic=True)[:_MESSAGE_BYTES])
    elif kind == "text":
        key.update(request.text[:_TEXT_CHARACTERS].encode())
    else:
        key.update(repr(list(request.token_ids.ids[:_TOKENS])).encode())
    conversation = key.digest()
    return Affinity(beginning or conversation, conversation)

"""Which requests had better be at the same scheduler, as one finds what was computed for the other there.

Chats begin alike if all is the same before the first message of the user, as with a system prompt; up to and with that,
they are the same conversation. One that begins with the user is like no other. What is no chat goes by how its prompt
begins. Every tokenizer service comes to the same hashes.
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

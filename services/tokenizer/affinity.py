"""Which requests had better be at the same scheduler, as one finds what was computed for the other there.

A conversation's key is made of its beginning, up to the first message of the user, which all of its requests share, and
no others do. What is no chat goes by how its prompt begins. Every tokenizer service comes to the same key.
"""

import hashlib
from itertools import takewhile

from pagewire.v1.inference_link_pb2 import GenerateSubmission

_TEXT_CHARACTERS = 1024
_TOKENS = 256
_MESSAGE_BYTES = 64 * 1024  # images make messages long


def affinity_of(submission: GenerateSubmission) -> bytes:
    request = submission.request
    key = hashlib.blake2b(digest_size=16)
    for part in (submission.context.tenant, request.cache_salt):
        key.update(part.encode())
        key.update(b"\0")
    kind = request.WhichOneof("prompt")
    if kind == "chat":
        messages = request.chat.messages
        before = list(takewhile(lambda message: message.role != "user", messages))
        for message in messages[: len(before) + 1]:
            key.update(message.SerializeToString(deterministic=True)[:_MESSAGE_BYTES])
    elif kind == "text":
        key.update(request.text[:_TEXT_CHARACTERS].encode())
    else:
        key.update(repr(list(request.token_ids.ids[:_TOKENS])).encode())
    return key.digest()

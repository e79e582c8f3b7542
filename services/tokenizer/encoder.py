"""Prompts to token ids, each distinct prompt once: the choices of one request all have the same."""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from protos.pagewire.v1 import inference_pb2
from services.tokenizer.pool import TokenizerPool
from services.tokenizer.prompts import encode_prompt


@dataclass(slots=True)
class _Encoding:
    task: asyncio.Task[list[int]]
    num_waiting: int = 0


class PromptEncoder:
    """Who asks for a prompt that is being encoded already waits for the same token ids."""

    def __init__(self, pool: TokenizerPool) -> None:
        self._pool = pool
        self._running: dict[Hashable, _Encoding] = {}

    async def encode(self, request: inference_pb2.GenerateRequest) -> Sequence[int]:
        """The prompt's token ids, not to be changed; may be empty. Raises RpcError (INVALID_ARGUMENT)."""
        kind = request.WhichOneof("prompt")
        if kind in (None, "token_ids") or (kind == "text" and self._pool.is_short(request.text)):
            return await encode_prompt(self._pool, request)
        key = _key(request)
        encoding = self._running.get(key)
        if encoding is None:
            encoding = self._running[key] = _Encoding(asyncio.create_task(encode_prompt(self._pool, request)))
        encoding.num_waiting += 1
        try:
            # One that is cancelled leaves it to the others.
            return await asyncio.shield(encoding.task)
        finally:
            encoding.num_waiting -= 1
            if not encoding.num_waiting:
                encoding.task.cancel()
                del self._running[key]


def _key(request: inference_pb2.GenerateRequest) -> Hashable:
    add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else None
    if request.WhichOneof("prompt") == "text":
        return request.text, add_special_tokens
    return request.chat.SerializeToString(deterministic=True), add_special_tokens

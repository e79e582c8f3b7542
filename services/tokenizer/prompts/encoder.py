"""Prompts to token ids. The pool encodes each distinct prompt once: all choices of a request have the same."""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.pool.text_limit import Room
from pagewire.services.tokenizer.prompts.prompts import Prompt, adds_special_tokens, encode_prompt
from pagewire.v1 import inference_pb2

# Short texts that the event loop encodes in a row: a millisecond, which is what others wait then.
MOST_AT_ONCE = 16


@dataclass(slots=True)
class _Encoding:
    task: asyncio.Task[Prompt]
    num_waiting: int = 0


class PromptEncoder:
    """Who asks for a prompt that is being encoded already waits for the same one."""

    def __init__(self, pool: TokenizerPool) -> None:
        self._pool = pool
        self._running: dict[Hashable, _Encoding] = {}
        self._num_at_once = 0  # since the event loop began its present turn

    async def encode(self, request: inference_pb2.GenerateRequest, room: Room, *, resubmitted: bool = False) -> Prompt:
        """resubmitted: it was let in before. Raises RpcError (INVALID_ARGUMENT, RESOURCE_EXHAUSTED)."""
        kind = request.WhichOneof("prompt")
        if kind in (None, "token_ids"):
            return await encode_prompt(self._pool, request)
        if kind == "text" and self._pool.encodes_at_once(request.text) and self._may_hold_up():
            return Prompt(self._pool.encode_at_once(request.text, add_special_tokens=adds_special_tokens(request)))
        key = _key(request), room
        encoding = self._running.get(key)
        if encoding is None:
            if not resubmitted:
                self._pool.check_room()
            task = asyncio.create_task(encode_prompt(self._pool, request, room))
            encoding = self._running[key] = _Encoding(task)
        encoding.num_waiting += 1
        try:
            # One that is cancelled leaves it to the others.
            return await asyncio.shield(encoding.task)
        finally:
            encoding.num_waiting -= 1
            if not encoding.num_waiting:
                encoding.task.cancel()
                del self._running[key]

    def _may_hold_up(self) -> bool:
        """Whether the event loop may encode one more itself before it does anything else."""
        if self._num_at_once == MOST_AT_ONCE:
            return False
        if not self._num_at_once:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_at_once += 1
        return True

    def _begin_turn(self) -> None:
        self._num_at_once = 0


def _key(request: inference_pb2.GenerateRequest) -> Hashable:
    add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else None
    if request.WhichOneof("prompt") == "text":
        return request.text, add_special_tokens
    return request.chat.SerializeToString(deterministic=True), add_special_tokens

"""Encodes prompts. Equal prompts that arrive together, as those of all choices of a request, are encoded once."""

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass

from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.services.tokenizer.pool.text_limit import Room
from pagewire.services.tokenizer.prompts.prompts import Prompt, adds_special_tokens, encode_prompt
from pagewire.v1 import inference_pb2

# Short texts that the event loop encodes in a row: a millisecond, during which other requests wait.
MOST_AT_ONCE = 16


@dataclass(slots=True, eq=False)
class _Encoding:
    request: inference_pb2.GenerateRequest
    task: asyncio.Task[Prompt]
    num_waiting: int = 0


class PromptEncoder:
    """Encodes prompts. A request with a prompt that is being encoded waits for the same result."""

    def __init__(self, pool: TokenizerPool) -> None:
        self._pool = pool
        # By a key that is cheap to compute. Chats with equal keys are compared whole.
        self._running: dict[Hashable, list[_Encoding]] = {}
        self._num_at_once = 0  # since the event loop began its present turn

    async def encode(self, request: inference_pb2.GenerateRequest, room: Room, *, resubmitted: bool = False) -> Prompt:
        """Returns the encoded prompt. resubmitted: an earlier attempt was admitted.

        Raises RpcError (INVALID_ARGUMENT, RESOURCE_EXHAUSTED).
        """
        kind = request.WhichOneof("prompt")
        if kind in (None, "token_ids"):
            return await encode_prompt(self._pool, request)
        if kind == "text" and not request.suffix and self._pool.encodes_at_once(request.text) and self._may_hold_up():
            return Prompt(self._pool.encode_at_once(request.text, add_special_tokens=adds_special_tokens(request)))
        key = _key(request), room
        encoding = next((one for one in self._running.get(key, ()) if one.request.chat == request.chat), None)
        if encoding is None:
            if not resubmitted:
                self._pool.check_room()
            encoding = _Encoding(request, asyncio.create_task(encode_prompt(self._pool, request, room)))
            self._running.setdefault(key, []).append(encoding)
        encoding.num_waiting += 1
        try:
            # A request that is cancelled leaves it to the others.
            return await asyncio.shield(encoding.task)
        finally:
            encoding.num_waiting -= 1
            if not encoding.num_waiting:
                encoding.task.cancel()
                self._running[key].remove(encoding)
                if not self._running[key]:
                    del self._running[key]

    def _may_hold_up(self) -> bool:
        """Whether the event loop may encode one more text itself before it does anything else."""
        if self._num_at_once == MOST_AT_ONCE:
            return False
        if not self._num_at_once:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._num_at_once += 1
        return True

    def _begin_turn(self) -> None:
        self._num_at_once = 0


def _key(request: inference_pb2.GenerateRequest) -> Hashable:
    messages = request.chat.messages
    last = messages[-1].content if messages else ""
    parsing = request.output_parsing
    what = request.WhichOneof("prompt"), request.text, request.suffix, adds_special_tokens(request)
    return *what, len(messages), last, parsing.WhichOneof("forced"), parsing.named

"""A whole answer, which may be large: it is made and written so that others' tokens go on."""

import asyncio
from collections.abc import Sequence

from starlette.types import Send

from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.outputs import ChoiceDelta, ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.generation.answer import Answer
from pagewire.gateway.generation.choice_limits import check_answer
from pagewire.gateway.generation.usage import UsageTotal

_LARGE = 64 * 1024  # bytes of an answer that takes longer than a turn of the event loop may
_PIECE = 256 * 1024  # bytes that are written at once


async def content_of(
    answer: Answer,
    choices: Sequence[PendingChoice],
    outputs: Sequence[ChoiceOutput],
    usage: UsageTotal,
    choices_per_prompt: int,
) -> bytes:
    """Returns the bytes of an answer, and makes a large one in a thread. Raises ApiError if it is too large."""

    def made() -> bytes:
        return encode(answer.whole(choices, outputs, usage))

    size = _size(choices, outputs, choices_per_prompt)
    if size <= _LARGE:
        return made()
    check_answer(size)
    return await asyncio.to_thread(made)


async def send_whole(send: Send, content: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Sends the head and the body of an answer, a large one in pieces."""
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": [*own, *headers]})
    for start in range(0, len(content) - _PIECE, _PIECE):
        await send({"type": "http.response.body", "body": content[start : start + _PIECE], "more_body": True})
    last = (len(content) - 1) // _PIECE * _PIECE
    await send({"type": "http.response.body", "body": content[last:] if last else content})


def _size(choices: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], choices_per_prompt: int) -> int:
    """Returns about how many bytes an answer has in the services' form; each choice repeats what is known of its
    prompt, which one of them has."""
    of_prompts = sum(choice.prompt_logprobs.ByteSize() for choice in choices if choice.prompt_logprobs is not None)
    return choices_per_prompt * of_prompts + sum(
        len(output.text) if isinstance(output, ChoiceDelta) else output.ByteSize() for output in outputs
    )

"""The outputs of a kept generation, as one HTTP response reads them from the log instead of from a `Reply`.

So all responses to the generation, from this gateway or another, have the same events.
"""

from collections.abc import Iterable, Sequence

from pagewire.gateway.core.outputs import ChoiceOutputs, merged_by_choice
from pagewire.gateway.core.reply import PendingChoice, Reply
from pagewire.gateway.kept.entries import decode_entry
from pagewire.gateway.kept.generation import KeptGeneration
from pagewire.v1.inference_pb2 import GenerateRequest


class KeptReply:
    def __init__(self, generation: KeptGeneration, requests: Sequence[GenerateRequest]) -> None:
        self.choices = Reply(_nothing, requests, streaming=False).choices
        self._generation = generation
        self._number = 0  # of the next entry
        self._error: BaseException | None = None
        generation.join(self)

    async def next(self) -> ChoiceOutputs:
        """Returns the outputs of the next entry; none at the end. Raises RpcError, ApiError, or the error of fail()."""
        generation = self._generation
        while self._error is None and self._number == len(generation.entries) and not generation.is_closed:
            await generation.changed.wait()
        if self._error is not None:
            raise self._error
        if self._number == len(generation.entries):
            if generation.error is not None:
                raise generation.error
            return []
        outputs: ChoiceOutputs = []
        for index, output in decode_entry(generation.entries[self._number]):
            self.choices[index].add_response(output)
            outputs.append((index, output))
        self._number += 1
        return outputs

    async def whole(self) -> ChoiceOutputs:
        """Returns all outputs of every choice. Raises like next()."""
        outputs: ChoiceOutputs = []
        while more := await self.next():
            outputs += more
        return merged_by_choice(outputs)

    def fail(self, error: BaseException) -> None:
        """Ends the response with an error; the first one counts."""
        if self._error is None:
            self._error = error
        self._generation.notify()
        self.abort()

    def abort(self) -> None:
        """Stops following. A generation without followers pauses."""
        self._generation.leave(self)


def _nothing(choices: Iterable[PendingChoice]) -> None:
    """Aborts nothing: `KeptGeneration` aborts."""

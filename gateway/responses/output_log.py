"""What background responses have said so far, in the store: enough to tell it again, and to go on after it."""

import time
from collections.abc import Sequence

from pagewire.gateway.store import Bound, Lease, Store
from pagewire.v1.inference_pb2 import GenerateResponse


class OutputLog:
    """The outputs of each response, numbered from 0; the first one has the prompt's token ids.

    Every method raises ApiError if the store fails.
    """

    def __init__(self, store: Store, max_bytes: int, ttl_s: float) -> None:
        self._documents = store.documents("response_output", Bound(count=2**62, bytes=max_bytes))
        self._ttl_s = ttl_s

    async def append(self, id: str, number: int, output: GenerateResponse, lease: Lease) -> None:
        """Raises LeaseLost."""
        expires_at = time.time() + self._ttl_s
        await self._documents.put(_key(id, number), output.SerializeToString(), expires_at=expires_at, lease=lease)

    async def read(self, id: str, number: int) -> GenerateResponse | None:
        document = await self._documents.get(_key(id, number))
        return None if document is None else GenerateResponse.FromString(document.value)

    async def read_all(self, id: str) -> list[GenerateResponse]:
        outputs: list[GenerateResponse] = []
        while (output := await self.read(id, len(outputs))) is not None:
            outputs.append(output)
        return outputs

    async def delete(self, id: str) -> None:
        number = 0
        while await self._documents.delete(_key(id, number)):
            number += 1


def end_of(outputs: Sequence[GenerateResponse]) -> GenerateResponse | None:
    """The last output, if it is one with a finish reason."""
    return outputs[-1] if outputs and outputs[-1].finish_reason else None


def _key(id: str, number: int) -> str:
    return f"{id}/{number}"

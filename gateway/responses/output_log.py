"""What background responses are to say and have said so far, in the store: enough to tell it again, and to go on."""

import time
from collections.abc import Sequence

from pagewire.gateway.store import Bound, Lease, Store
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse

_REQUEST = "request"


class OutputLog:
    """The request of each response until its end, and its outputs, numbered from 0; the first has the prompt's tokens.

    If there is too much of it, what is oldest makes room.

    Every method raises ApiError if the store fails.
    """

    def __init__(self, store: Store, max_bytes: int, ttl_s: float) -> None:
        self._documents = store.documents("response_output", Bound(count=2**62, bytes=max_bytes))
        self._ttl_s = ttl_s

    async def put_request(self, id: str, request: GenerateRequest) -> None:
        await self._documents.put(_key(id, _REQUEST), request.SerializeToString(), expires_at=self._expires_at())

    async def request(self, id: str) -> GenerateRequest | None:
        document = await self._documents.get(_key(id, _REQUEST))
        return None if document is None else GenerateRequest.FromString(document.value)

    async def delete_request(self, id: str) -> None:
        await self._documents.delete(_key(id, _REQUEST))

    async def append(self, id: str, number: int, output: GenerateResponse, lease: Lease) -> None:
        """Raises LeaseLost."""
        value = output.SerializeToString()
        await self._documents.put(_key(id, number), value, expires_at=self._expires_at(), lease=lease)

    async def read(self, id: str, number: int) -> GenerateResponse | None:
        document = await self._documents.get(_key(id, number))
        return None if document is None else GenerateResponse.FromString(document.value)

    async def read_all(self, id: str) -> list[GenerateResponse]:
        outputs: list[GenerateResponse] = []
        while (output := await self.read(id, len(outputs))) is not None:
            outputs.append(output)
        return outputs

    async def delete(self, id: str) -> None:
        """The request and all outputs."""
        await self._documents.delete_all(_key(id, ""))

    def _expires_at(self) -> float:
        return time.time() + self._ttl_s


def end_of(outputs: Sequence[GenerateResponse]) -> GenerateResponse | None:
    """The last output, if it is one with a finish reason."""
    return outputs[-1] if outputs and outputs[-1].finish_reason else None


def _key(id: str, part: int | str) -> str:
    return f"{id}/{part}"

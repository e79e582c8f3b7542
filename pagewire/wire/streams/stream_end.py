"""How a stream ended."""

from dataclasses import dataclass
from typing import Self

import grpc

from pagewire.wire.rpc import RpcError
from pagewire.wire.status import error_details


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What one side knows about the end of a stream."""

    text: str  # for the log
    code: grpc.StatusCode | None = None  # None: this side broke it; OK: the other side closed it
    reason: str = ""  # that the other side gave, as `RpcError.reason`; empty if the connection failed
    starts_over: bool = False  # this side wanted another stream

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError | RpcError) -> Self:
        if isinstance(error, RpcError):
            return cls(f"{error.code.name}: {error.message}", error.code)
        return cls(f"{error.code().name}: {error.details()}", error.code(), error_details.reason_of(error))

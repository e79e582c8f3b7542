"""The end of a stream."""

from dataclasses import dataclass
from typing import Self

import grpc

from pagewire.wire.rpc import RpcError
from pagewire.wire.status import error_details


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of a stream, as one side sees it."""

    text: str  # for the log
    code: grpc.StatusCode | None = None  # None: this side broke it; OK: the other side closed it
    reason: str = ""  # `RpcError.reason` of the other side; "" if the connection failed
    starts_over: bool = False  # this side wanted another stream

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError | RpcError) -> Self:
        if isinstance(error, RpcError):
            return cls(f"{error.code.name}: {error.message}", error.code)
        return cls(f"{error.code().name}: {error.details()}", error.code(), error_details.reason_of(error))

"""Errors with a gRPC status, in Python, in messages and in calls."""

from collections.abc import Sequence
from typing import Self

import grpc

from pagewire.v1 import common_pb2
from pagewire.wire.status import error_details

_CODE_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}


# Statuses are HTTP/2 headers, of which gRPC accepts 8 KiB; a character beyond ASCII takes up to 12 bytes there.
_MAX_DETAILS = 2000
_MAX_DETAILS_NOT_ASCII = 600


def _clipped(message: str) -> str:
    """Shortens a message for a status, by its middle: a message may quote a long value of the client."""
    limit = _MAX_DETAILS if message.isascii() else _MAX_DETAILS_NOT_ASCII
    return message if len(message) <= limit else f"{message[: limit // 2]} ... {message[-limit // 3 :]}"


class RpcError(Exception):
    """An error with a gRPC status, which servicers raise and multiplexed streams carry."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        violations: Sequence[error_details.Violation] = (),
        retry_delay: float | None = None,
        reason: str = "",
    ) -> None:
        """violations: (field, description) of each error in the request, if that is the cause.

        retry_delay: seconds after which the same request will probably be taken; None: unknown. reason: a specific code
        for programs, in the ErrorInfo of the call."""
        message = _clipped(message)
        super().__init__(message)
        self.code = code
        self.message = message
        self.violations = tuple(violations)
        self.retry_delay = retry_delay
        self.reason = reason

    @classmethod
    def from_call(cls, error: grpc.aio.AioRpcError) -> Self:
        """Returns the error of a failed call."""
        violations, retry_delay = error_details.violations_of(error), error_details.retry_delay_of(error)
        return cls(error.code(), error.details() or error.code().name, violations, retry_delay)

    @classmethod
    def from_message(cls, error: common_pb2.RequestError) -> Self:
        """Returns the error in a message of a multiplexed stream; unknown codes become UNKNOWN."""
        code = _CODE_BY_NUMBER.get(error.code, grpc.StatusCode.UNKNOWN)
        retry_delay = error_details.seconds(error.retry_delay) if error.HasField("retry_delay") else None
        return cls(code, error.message, [(one.field, one.description) for one in error.violations], retry_delay)

    def to_message(self) -> common_pb2.RequestError:
        violations = [common_pb2.FieldViolation(field=field, description=why) for field, why in self.violations]
        delay = None if self.retry_delay is None else error_details.duration(self.retry_delay)
        return common_pb2.RequestError(code=self.number, message=self.message, violations=violations, retry_delay=delay)

    def renamed(self, field: str, prefix: str) -> Self:
        """Returns the error for a client with `prefix` instead of `field` in its request, or before all fields if that
        is ""."""
        if not field:
            violations = [(f"{prefix}.{path}", why) for path, why in self.violations]
            return type(self)(self.code, self.message, violations, self.retry_delay)
        if not any(path == field for path, _ in self.violations):
            return self
        violations = [
            (prefix, why.replace(field, prefix)) if path == field else (path, why) for path, why in self.violations
        ]
        return type(self)(self.code, self.message.replace(field, prefix), violations)

    async def abort(self, context: grpc.aio.ServicerContext) -> None:
        """Ends a call with this error."""
        trailers = error_details.trailers(self.code, self.message, self.violations, self.retry_delay, self.reason)
        await context.abort(self.code, self.message, trailers)

    @property
    def number(self) -> int:
        """The google.rpc.Code number, as RequestError carries it."""
        return int(self.code.value[0])

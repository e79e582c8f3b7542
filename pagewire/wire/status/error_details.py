"""The details of a status besides code and message, as messages of google.rpc, which clients in any language read."""

from collections.abc import Iterable, Sequence

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

# The metadata key that gRPC's libraries use.
KEY = "grpc-status-details-bin"
DOMAIN = "pagewire"
RETRY_AFTER_S = 1

# (field, description)
Violation = tuple[str, str]

# The names are part of the public contract.
_REASONS = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_REQUEST",
    grpc.StatusCode.NOT_FOUND: "MODEL_NOT_FOUND",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "TOO_MANY_REQUESTS",
    grpc.StatusCode.UNAVAILABLE: "SERVICE_UNAVAILABLE",
    grpc.StatusCode.FAILED_PRECONDITION: "NOT_ENABLED",
    grpc.StatusCode.ABORTED: "ABORTED",
    grpc.StatusCode.INTERNAL: "INTERNAL",
}
_RETRIED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
# Clients accept 8 KiB of trailers by default, which include the message.
_MAX_BYTES = 3 * 1024
_MAX_VIOLATIONS = 32


def trailers(
    code: grpc.StatusCode,
    message: str,
    violations: Sequence[Violation],
    retry_delay: float | None = None,
    reason: str = "",
) -> tuple[tuple[str, bytes], ...]:
    """Returns the trailers of a call that ends with this status; () if the message alone is too long.

    They have ErrorInfo, RetryInfo if the same request may be served later, and BadRequest with as many violations as
    fit. retry_delay: seconds; None: unknown, RETRY_AFTER_S. reason: of ErrorInfo; "": the one of the code.
    """
    details: list[Message] = [ErrorInfo(reason=reason or _REASONS.get(code, code.name), domain=DOMAIN)]
    if code in _RETRIED:
        details.append(RetryInfo(retry_delay=duration(RETRY_AFTER_S if retry_delay is None else retry_delay)))
    for count in range(min(len(violations), _MAX_VIOLATIONS), -1, -1):
        bad = [BadRequest(field_violations=map(_field_violation, violations[:count]))] if count else []
        status = Status(code=code.value[0], message=message, details=map(_packed, [*details, *bad]))
        if status.ByteSize() <= _MAX_BYTES:
            return ((KEY, status.SerializeToString()),)
    return ()


def is_of_service(error: grpc.aio.AioRpcError) -> bool:
    """Returns whether a service of Pagewire sent this status; otherwise the connection failed."""
    return any(key == KEY for key, _ in error.trailing_metadata() or ())


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Returns the reason that one of our services gave for a failed call; empty if the connection failed."""
    info = ErrorInfo()
    return info.reason if any(detail.Unpack(info) for detail in _details(error)) else ""


def violations_of(error: grpc.aio.AioRpcError) -> list[Violation]:
    """Returns the violations in the status of a failed call."""
    bad = BadRequest()
    found = any(detail.Unpack(bad) for detail in _details(error))
    return [(one.field, one.description) for one in bad.field_violations] if found else []


def retry_delay_of(error: grpc.aio.AioRpcError) -> float | None:
    """Returns the seconds after which a failed call may be repeated; None if its status has none."""
    info = RetryInfo()
    found = any(detail.Unpack(info) for detail in _details(error))
    return seconds(info.retry_delay) if found else None


def duration(seconds: float) -> Duration:
    whole = Duration()
    whole.FromNanoseconds(int(seconds * 1e9))
    return whole


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _details(error: grpc.aio.AioRpcError) -> Sequence[Any]:
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == KEY and isinstance(value, bytes):
            try:
                return Status.FromString(value).details
            except DecodeError:
                return ()
    return ()


def _packed(message: Message) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed


def _field_violation(violation: Violation) -> BadRequest.FieldViolation:
    return BadRequest.FieldViolation(field=violation[0], description=violation[1])

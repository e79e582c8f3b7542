"""Errors as Anthropic's clients read them: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from collections.abc import Mapping

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.messages.bodies.answers import (
    NO_THREADS,
    MessagesError,
    MessagesErrorDetail,
    MessagesErrorDetails,
    MessagesErrorType,
)

_PATH = "/v1/messages"
_SHARED = "/v1/models"  # clients of both APIs ask for it; the header tells which API is meant
_TYPES: Mapping[int, MessagesErrorType] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesDialect:
    """A `Dialect`."""

    request_id_header: bytes | None = b"request-id"

    def error_body(self, error: ApiError, request_id: str) -> MessagesError:
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        detail = MessagesErrorDetail(type=kind, message=error.message)
        if error.code == NO_THREADS:
            detail.details = MessagesErrorDetails(error_code=error.code, unsupported=[error.param or ""])
        return MessagesError(error=detail, request_id=request_id)


MESSAGES = MessagesDialect()


def is_spoken(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Returns whether an answer has the shape of this API: its route decides, and for a shared one the header
    `anthropic-version`."""
    root = next((root for root in (_PATH, _SHARED) if path == root or path.startswith(f"{root}/")), "")
    return root == _PATH or (root == _SHARED and b"anthropic-version" in headers)

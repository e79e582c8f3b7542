"""Errors of requests, and the shapes in which APIs report them."""

from collections.abc import Sequence
from typing import Protocol

import grpc

from pagewire.gateway.core.body import Body, ErrorDetail, ErrorResponse
from pagewire.wire.rpc import RpcError
from pagewire.wire.status.error_details import Violation

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    416: "invalid_request_error",
    422: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


_STATUS_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


# OpenAI's machine-readable codes, where they exist.
_OPENAI_CODES = {
    grpc.StatusCode.NOT_FOUND: "model_not_found",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rate_limit_exceeded",
}


# Fields of gRPC requests that hold the prompt, and nested messages that bodies flatten.
_PROMPTS = ("text", "token_ids", "prompt", "prompt_token_ids")
CONTAINERS = ("sampling_params", "options")


# Of a message and the name of a parameter: a request can have texts of any length there.
MAX_MESSAGE_CHARS = 4000
MAX_PARAM_CHARS = 400


class ApiError(Exception):
    """A request that ends with an HTTP error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_delay: float | None = None,
        violations: Sequence[Violation] = (),
    ) -> None:
        """
        Args:
            param: the parameter that is wrong.
            code: a machine-readable cause.
            retry_delay: seconds after which the same request will probably be admitted; None: unknown.
            violations: (path in the gRPC request, description) of each fault. When the error is sent, they are phrased
                for the client and replace param and message.
        """
        super().__init__(_cut(message, MAX_MESSAGE_CHARS))
        self.retry_delay = retry_delay
        self.status = status
        self.message = _cut(message, MAX_MESSAGE_CHARS)
        self.param = None if param is None else _cut(param, MAX_PARAM_CHARS)
        self.code = code
        self.violations = tuple(violations)

    def body(self) -> ErrorResponse:
        kind = _TYPES.get(self.status, "server_error")
        return ErrorResponse(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class Dialect(Protocol):
    """The error format of an API that clients speak."""

    # The header of an answer that repeats the request id in addition to X-Request-Id; None if the API has none.
    request_id_header: bytes | None

    def error_body(self, error: ApiError, request_id: str) -> Body:
        """Returns the JSON of an error."""


class OpenAiDialect:
    """The shape of OpenAI's errors, and the default: {"error": {"message", "type", "param", "code"}}."""

    request_id_header: bytes | None = None

    def error_body(self, error: ApiError, request_id: str) -> Body:
        return error.body()


OPENAI = OpenAiDialect()


def from_rpc(error: RpcError) -> ApiError:
    """Returns the HTTP error of a gRPC status; 500 for statuses that clients cannot cause."""
    status = _STATUS_BY_CODE.get(error.code, 500)
    param = "model" if status == 404 else None
    if error.violations:
        param = parameter_of(error.violations[0][0])
    return ApiError(
        status,
        error.message,
        param=param,
        code=_OPENAI_CODES.get(error.code),
        retry_delay=error.retry_delay,
        violations=error.violations,
    )


def parameter_of(path: str) -> str | None:
    """Returns the name of a gRPC field in chats and completions; None if each API has its own name for it."""
    first, _, rest = path.partition(".")
    if first in _PROMPTS:
        return "prompt"
    if first == "beam_search" and rest:
        return rest
    if first == "chat":
        is_message = rest.partition("[")[0] in ("", "messages")
        return "messages" if is_message else rest.replace("_json", "")
    if first in CONTAINERS:
        return rest
    return None if first == "output_parsing" else path

"""Errors in the shape that the client expects.

OpenAI's is {"error": {"message", "type", "param", "code"}}, Anthropic's {"type": "error", "error": {"type", "message"},
"request_id"}.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Scope

from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.field_names import rename
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.messages.responses import (
    NO_THREADS,
    MessagesError,
    MessagesErrorDetail,
    MessagesErrorDetails,
    MessagesErrorType,
)
from pagewire.gateway.schema.responses import ErrorDetail, ErrorResponse
from pagewire.wire.rpc import RpcError

RETRY_AFTER_S = 1

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
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_ANTHROPIC_TYPES: Mapping[int, MessagesErrorType] = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
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

# OpenAI's machine-readable codes, where it has one.
_OPENAI_CODES = {
    grpc.StatusCode.NOT_FOUND: "model_not_found",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "rate_limit_exceeded",
}


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
    ) -> None:
        """retry_delay: seconds after which the same request will probably be taken; None: nobody knows."""
        super().__init__(message)
        self.retry_delay = retry_delay
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> ErrorResponse:
        kind = _TYPES.get(self.status, "server_error")
        return ErrorResponse(error=ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code))

    def anthropic_body(self, request_id: str) -> MessagesError:
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        detail = MessagesErrorDetail(type=kind, message=self.message)
        if self.code == NO_THREADS:
            detail.details = MessagesErrorDetails(error_code=self.code, unsupported=[self.param or ""])
        return MessagesError(error=detail, request_id=request_id)


def from_rpc(error: RpcError) -> ApiError:
    """The HTTP error of a gRPC status. Statuses that no client can cause are 500."""
    status = _STATUS_BY_CODE.get(error.code, 500)
    param = "model" if status == 404 else None
    if error.violations:
        param = _param(error.violations[0][0])
    code, retry_delay = _OPENAI_CODES.get(error.code), error.retry_delay
    return ApiError(status, error.message, param=param, code=code, retry_delay=retry_delay)


def _param(field: str) -> str | None:
    """What REST calls a field of gRPC's requests; None where each route calls it by another name."""
    first, _, rest = field.partition(".")
    if first in ("text", "token_ids", "prompt", "prompt_token_ids"):
        return "prompt"
    if first == "beam_search" and rest:
        return rest
    if first == "chat":
        is_message = rest.partition("[")[0] in ("", "messages")
        return "messages" if is_message else rest.replace("_json", "")
    if first in ("sampling_params", "options"):
        return rest
    return None if first == "output_parsing" else field


def error_response(error: ApiError, scope: Scope) -> Response:
    """In the shape of the API that the request of this scope speaks."""
    context, headers = request_context(scope), {}
    rename(error, context.names)
    if error.status in (429, 503):
        delay = RETRY_AFTER_S if error.retry_delay is None else error.retry_delay
        headers["retry-after"] = str(math.ceil(delay))
        headers["retry-after-ms"] = str(math.ceil(1000 * delay))  # OpenAI's and Anthropic's clients read it first
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    body = error.anthropic_body(context.request_id) if context.speaks_anthropic else error.body()
    return json_response(body, error.status, headers)


def install_handlers(app: FastAPI) -> None:
    """Every error that a route or the router raises leaves as error_response() says it."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(grpc.aio.AioRpcError)
    async def on_rpc_error(request: Request, error: grpc.aio.AioRpcError) -> Response:
        return error_response(from_rpc(RpcError.from_call(error)), request.scope)

    @app.exception_handler(UnicodeEncodeError)
    async def on_unicode_error(request: Request, error: UnicodeEncodeError) -> Response:
        # JSON can escape half a surrogate pair; no message on the wire can carry it.
        half = ascii(error.object[error.start])
        message = f"the body holds {half}, half a surrogate pair: not valid Unicode text"
        return error_response(ApiError(400, message), request.scope)

    @app.exception_handler(RecursionError)
    async def on_recursion_error(request: Request, error: RecursionError) -> Response:
        # Only bodies nest; what reads and writes JSON gives up at a depth of its own.
        return error_response(ApiError(400, "the body is nested too deeply"), request.scope)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(from_validation(error.errors(), error.body), request.scope)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code == 404:
            message = f"no route {request.method} {request.url.path}; see /docs"
        elif error.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        response = error_response(ApiError(error.status_code, message), request.scope)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            methods = {*response.headers.get("allow", "").split(", "), *_documented_methods(request)} - {""}
            response.headers["allow"] = ", ".join(sorted(methods))
        return response


def _documented_methods(request: Request) -> set[str]:
    """What the path takes, by all its routes; the router knows of the first one."""
    paths: Mapping[str, Mapping[str, Any]] = request.app.openapi()["paths"]
    path = request.url.path
    taken = [paths[path]] if path in paths else [paths[one] for one in paths if compile_path(one)[0].match(path)]
    return {method.upper() for methods in taken for method in methods}


def from_validation(errors: Sequence[Mapping[str, Any]], body: object) -> ApiError:
    """The first faulty parameter of a request, by name, with everything that is wrong with it."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']} at position {first['loc'][-1]}")
    if isinstance(body, bytes):
        return ApiError(400, "send a JSON object with the header Content-Type: application/json")
    if not isinstance(body, dict):
        return ApiError(400, "the body must be a JSON object")
    # A union reports every branch; the one that came furthest is the one that was meant.
    located = [
        (_path(error, body), _lower_first(error["msg"])) for error in errors if error["loc"][1:2] == first["loc"][1:2]
    ]
    path = max((path for path, _ in located), key=len)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    messages = dict.fromkeys(message for other, message in located if other == path)
    return ApiError(400, f"{param}: {', or '.join(messages)}", param=param)


def with_integers(errors: Sequence[Mapping[str, Any]], body: object) -> bool:
    """Whether numbers such as 16.0 stand where integers belong, which to JSON they are: puts these there."""
    found = False
    for path in {_path(error, body) for error in errors if error["type"] == "int_type"}:
        holder: Any = body
        for part in path[:-1]:
            holder = holder[part]
        # The first wrong one of a list is told, so all of it is looked at.
        for key in range(len(holder)) if isinstance(holder, list) else path[-1:]:
            if isinstance(value := holder[key], float) and value.is_integer():
                holder[key], found = int(value), True
    return found


def _path(error: Mapping[str, Any], body: object) -> tuple[str | int, ...]:
    """("messages", 0, "content"): a pydantic location without the parts that name a branch of a union."""
    path: list[str | int] = []
    value = body
    for part in error["loc"][1:]:
        if (isinstance(part, int) and isinstance(value, list)) or (isinstance(value, dict) and part in value):
            path.append(part)
            value = value[part]
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    return tuple(path)


def _lower_first(text: str) -> str:
    text = text.removeprefix("Value error, ")
    return text[:1].lower() + text[1:]

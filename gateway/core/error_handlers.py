"""Errors of routes and of the router as HTTP responses."""

import math

import grpc
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Mount
from starlette.types import Scope

from pagewire.gateway.core.encoding import json_response
from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.field_names import rename
from pagewire.gateway.core.request_context import request_context
from pagewire.gateway.core.validation import from_validation
from pagewire.wire.rpc import RpcError

RETRY_AFTER_S = 1


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns the response to an error, in the shape of the API that the client speaks."""
    context, headers = request_context(scope), {}
    rename(error, context.names)
    if error.status in (429, 503):
        delay = RETRY_AFTER_S if error.retry_delay is None else error.retry_delay
        headers["retry-after"] = str(math.ceil(delay))
        headers["retry-after-ms"] = str(math.ceil(1000 * delay))  # OpenAI's and Anthropic's clients read it first
    if error.status == 501:
        headers["x-should-retry"] = "false"  # OpenAI's and Anthropic's clients repeat requests after a 5xx
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(context.dialect.error_body(error, context.request_id), error.status, headers)


_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")


def install_handlers(app: FastAPI) -> None:
    """Turns every error of a route or of the router into error_response()."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(grpc.aio.AioRpcError)
    async def on_rpc_error(request: Request, error: grpc.aio.AioRpcError) -> Response:
        return error_response(from_rpc(RpcError.from_call(error)), request.scope)

    @app.exception_handler(UnicodeEncodeError)
    async def on_unicode_error(request: Request, error: UnicodeEncodeError) -> Response:
        # JSON can escape half a surrogate pair, which protobuf cannot carry.
        half = ascii(error.object[error.start])
        message = f"the body is not valid Unicode text: it contains {half}, half a surrogate pair"
        return error_response(ApiError(400, message), request.scope)

    @app.exception_handler(RecursionError)
    async def on_recursion_error(request: Request, error: RecursionError) -> Response:
        # JSON is read and written up to some depth.
        if request.method not in ("PATCH", "POST", "PUT"):
            raise error  # the fault is not in a body
        return error_response(ApiError(400, "the body is nested too deeply"), request.scope)

    @app.exception_handler(RequestValidationError)
    async def on_validation_error(request: Request, error: RequestValidationError) -> Response:
        return error_response(from_validation(error.errors(), error.body), request.scope)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = error.detail
        if error.status_code == 404:
            message = f"no route {request.method} {request.url.path}{'; see /docs' if request.app.openapi_url else ''}"
        elif error.status_code == 405:
            message = f"{request.url.path} does not support {request.method}"
        response = error_response(ApiError(error.status_code, message), request.scope)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            methods = {*response.headers.get("allow", "").split(", "), *_methods(request)} - {""}
            response.headers["allow"] = ", ".join(sorted(methods))
        return response


def _methods(request: Request) -> set[str]:
    """Returns the methods of all routes with this path; the router reports those of the first one."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]
    scopes = {method: {**request.scope, "method": method} for method in _METHODS}
    return {
        method for method, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)
    }

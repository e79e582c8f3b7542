"""Errors of requests that are not valid."""

import grpc

from pagewire.errors import InvalidRequest
from pagewire.wire.rpc import RpcError


def invalid(message: str, field: str = "") -> RpcError:
    """Returns an INVALID_ARGUMENT. message: cause and remedy. field: path of the wrong field in the request; "" =
    several."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, [(field, message)] if field else ())


def invalid_request(error: InvalidRequest) -> RpcError:
    """Returns an INVALID_ARGUMENT with all violations that a check found."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.violations)

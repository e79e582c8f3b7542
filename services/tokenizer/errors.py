"""Errors of a request that is at fault itself."""

import grpc

from pagewire.errors import InvalidRequest
from pagewire.wire.rpc import RpcError


def invalid(message: str, field: str = "") -> RpcError:
    """message: cause and remedy, for a person. field: path in the client's request of what is wrong, "" = several."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, [(field, message)] if field else ())


def invalid_request(error: InvalidRequest) -> RpcError:
    """What a check found."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, str(error), error.violations)

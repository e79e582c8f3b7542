"""Errors of a request that is at fault itself."""

import grpc

from pagewire.rpc import RpcError


def invalid(message: str) -> RpcError:
    """message: cause and remedy, for a person."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message)

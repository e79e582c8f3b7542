"""The statuses of requests and changes that cannot be served."""

import re

import grpc

from pagewire.config.values.adapter_names import RULE, is_adapter_name
from pagewire.wire.model_names import unservable
from pagewire.wire.rpc import RpcError

_MAX_PATH_BYTES = 4095
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_name(name: str) -> None:
    """Raises RpcError (INVALID_ARGUMENT) for a name that no adapter can have."""
    if not is_adapter_name(name):
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"name: {RULE}", [("name", f"name: {RULE}")])


def check_path(path: str) -> None:
    """Raises RpcError (INVALID_ARGUMENT) for a path that no file can have."""
    if "://" in path:
        what = f"path: expected one on the executors' machines, found the URL {path!r:.100}; download the adapter there"
    elif _CONTROL.search(path) or len(path.encode()) > _MAX_PATH_BYTES:
        what = f"path: expected that of a file, found {path!r:.100}, which is none; name the folder of the adapter"
    else:
        return
    raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("path", what)])


def not_found(name: str, why: str = "") -> RpcError:
    """Returns the status of a name that stands for nothing. why: the executor's reason, which may name the adapter."""
    what = unservable(name, why) if why else f"the adapter {name!r:.100} does not exist"
    return RpcError(grpc.StatusCode.NOT_FOUND, why if why.startswith("the adapter ") else what)


def unserved() -> RpcError:
    """Returns the status of requests where no executor has slots."""
    return RpcError(
        grpc.StatusCode.FAILED_PRECONDITION, "the executors serve no adapters; start them with --enable-lora"
    )


def unavailable() -> RpcError:
    """Returns the status of a change without an executor."""
    return RpcError(grpc.StatusCode.UNAVAILABLE, "no executor is available to load an adapter; try again later")


def gone(what: str) -> RpcError:
    """Returns the status of a request with contents that are not available any longer."""
    return RpcError(grpc.StatusCode.FAILED_PRECONDITION, what)


def of_executor(error: grpc.aio.AioRpcError) -> RpcError:
    """Returns the status of a change that an executor refused, or during which it was lost."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return unserved()
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return RpcError.from_call(error)
    return RpcError(
        grpc.StatusCode.UNAVAILABLE,
        f"an executor was lost while it loaded the adapter ({error.details()}); nothing has changed, try again",
    )

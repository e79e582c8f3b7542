"""The error after which an executor cannot go on."""

from __future__ import annotations

import grpc


class DeviceError(RuntimeError):
    """The device is in an unknown state or hangs, the model is damaged, or a rank is lost: the process has to end."""

    def __init__(self, message: str, code: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> None:
        """code: the status that ends the stream of steps."""
        super().__init__(message)
        self.code = code

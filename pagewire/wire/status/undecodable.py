"""Requests that cannot be decoded: an error for the client, and one log line for many of them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

logger = logging.getLogger(__name__)

# Seconds between two log lines: a client may send many such requests.
LOG_EVERY_S = 60.0


@dataclass(frozen=True)
class Undecodable:
    """Takes the place of a request that could not be decoded."""

    reason: str


class Deserializer:
    """Decodes requests of one method. grpcio itself would log a traceback per call and return an empty status."""

    _last_logged = -LOG_EVERY_S
    _num_unlogged = 0

    def __init__(self, method: str, deserialize: Callable[[bytes], Any]) -> None:
        """method: its full name, as in "/pagewire.v1.InferenceService/Generate"."""
        self._method = method
        self._deserialize = deserialize

    def __call__(self, data: bytes) -> Any:
        try:
            return self._deserialize(data)
        except DecodeError as error:
            self._log(error)
            return Undecodable(
                f"the request of {self._method} cannot be decoded: {error}; generate the client from the server's "
                "protos"
            )

    def _log(self, error: DecodeError) -> None:
        shared, now = Deserializer, time.monotonic()
        shared._num_unlogged += 1
        if now - shared._last_logged >= LOG_EVERY_S:
            count = shared._num_unlogged
            logger.warning("requests that could not be decoded: %d; the last one of %s: %s", count, self._method, error)
            shared._last_logged, shared._num_unlogged = now, 0

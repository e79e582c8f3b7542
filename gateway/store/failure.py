"""Errors of the data directory: clients receive the cause, operators also the place."""

import logging
import math
import time
from pathlib import Path

from pagewire.gateway.core.errors import ApiError

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
_logged: dict[str, float] = {}  # kind of the failure -> time of its latest log line


def storage_failure(directory: Path, error: Exception, *, is_full: bool) -> ApiError:
    """Returns ApiError 507 for a full disk, else 500. Logs at most one line a minute for each kind of failure."""
    now, kind = time.monotonic(), "full" if is_full else type(error).__name__
    cause = "no space is left: free some" if is_full else f"cannot be used: {error}"
    if now - _logged.get(kind, -math.inf) >= _LOG_EVERY_S:
        _logged[kind] = now
        logger.error("--data-dir %s: %s; requests that store something there fail", directory, cause)
    if is_full:
        return ApiError(507, "no space is left in the gateway's data directory")
    return ApiError(500, "the gateway's data directory cannot be used; its log says why")

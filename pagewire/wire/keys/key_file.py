"""The file of --api-key-file, read again when it changes."""

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from pagewire.errors import StartupError
from pagewire.wire.keys.entry import Key, parse_keys

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
_Version = tuple[int, int, int]


class KeyFile:
    def __init__(self, path: str, check_interval: float = CHECK_INTERVAL_S) -> None:
        """check_interval: seconds. Raises StartupError for a file that cannot be read, or has a wrong line."""
        self._path = Path(path).expanduser()
        self._check_interval = check_interval
        try:
            self._version: _Version | None = self._find_version()
            self._keys = self._read()
        except (OSError, ValueError) as error:
            raise StartupError(f"--api-key-file {self._path}: {_cause(error)}") from error
        self._warn_of_none()
        self._checked = time.monotonic()

    def keys(self) -> Mapping[bytes, Key]:
        """By digest. A file that is missing or wrong by now changes nothing: the log says so, once."""
        now = time.monotonic()
        if now - self._checked >= self._check_interval:
            self._checked = now
            self._reload()
        return self._keys

    def _reload(self) -> None:
        before = self._version
        try:
            self._version = self._find_version()
            if self._version != before:
                self._keys = self._read()
                logger.info("--api-key-file %s: %d keys", self._path, len(self._keys))
                self._warn_of_none()
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                self._version = None
            if self._version != before:
                cause = _cause(error)
                logger.error("--api-key-file %s: %s; the keys of before stay until it is mended", self._path, cause)

    def _warn_of_none(self) -> None:
        if not self._keys:
            logger.warning("--api-key-file %s has no keys: nobody gets in; `pagewire keys add` adds one", self._path)

    def _find_version(self) -> _Version:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> dict[bytes, Key]:
        return parse_keys(self._path.read_text("utf-8-sig"))  # editors of Windows begin a file with a mark


def _cause(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):  # whose message has a part of the file
        return "is no text"
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)

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
    """The keys in a file."""

    def __init__(self, path: str, check_interval: float = CHECK_INTERVAL_S) -> None:
        """check_interval: in seconds. Raises StartupError for a file that cannot be read, or has a wrong line."""
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
        """Returns keys by digest. If the file is now missing or wrong, the previous keys remain; that is logged
        once."""
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
                logger.error(
                    "--api-key-file %s: %s; the previous keys remain in use until this is fixed", self._path, cause
                )

    def _warn_of_none(self) -> None:
        if not self._keys:
            logger.warning(
                "--api-key-file %s has no keys, so every request is refused; add one with `pagewire keys add`",
                self._path,
            )

    def _find_version(self) -> _Version:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _read(self) -> dict[bytes, Key]:
        return parse_keys(self._path.read_text("utf-8-sig"))  # editors on Windows write a byte order mark


def _cause(error: OSError | ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):  # its message would quote the file
        return "is not text"
    return f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
